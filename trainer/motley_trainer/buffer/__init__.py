"""The trajectory buffer beside rank 0: deals prompts, keeps every acknowledged trajectory, assembles batches.

A light process: no torch. SQLite in WAL mode with one writer and synchronous=FULL; an acknowledgement means that the rows
are on the disk. Which trajectories went to which step is written before the step trains, so that after a crash the same
steps replay on the same batches.
"""
