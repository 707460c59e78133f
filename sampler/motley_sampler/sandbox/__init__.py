"""Sandboxes: where the policy's commands and the graders run.

``host`` is the asyncio side; ``launcher``, ``init``, ``kernel`` and ``confine`` run in small processes of their own that
import nothing but the standard library. This file stays empty of imports so that they start fast.
"""
