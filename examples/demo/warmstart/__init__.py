"""What the demo's policy was taught: task families, the few commands they need, a noisy demonstrator, tokenizer, network.

Everything here is pure; ``make_tasks.py``, ``make_tokenizer.py`` and ``make_model.py`` beside this folder do the writing.
"""
