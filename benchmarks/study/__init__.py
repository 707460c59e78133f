"""The study in miniature: corrected and uncorrected GRPO on an emulated mixed fleet, one process and one core per arm and seed.

    python -m benchmarks.study --arm sc_mis_topp --seeds 0,1,2      one arm
    python -m benchmarks.study                                      every arm that is not there yet, then table and plots

Nothing of the product is written a second time here: episodes are made of the rollout worker's language, tool calls and transcripts,
tokens are drawn by the reference engine's scheduler under each group's arithmetic from views that the codecs encoded, and batches
go through the trainer's own step (Megatron model, losses, metrics, ledger records). What is left out is what lies between
the parts: HTTP, the router, sandboxes (commands run on the demo's simulated toolbox, which tests hold against bash), and time:
each group lags behind the trainer by its own fixed number of steps.
"""
