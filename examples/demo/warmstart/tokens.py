"""The tokenizer: whole words of the demo's world, and the 256 bytes for everything else.

Encoding takes the longest known piece at each position, left to right; what is not known is spelled in bytes. So every text
round-trips exactly. It is an ordinary ``tokenizer.json``: a byte-level BPE without merges, fed by a split on the known pieces.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from warmstart import words

VOCAB_SIZE = 384  # a multiple of 128: tensor-parallel shards and 128 x 128 blocks stay whole

# Qwen's layout, except that nothing stands between a message's end and the next one's start: a transcript then grows only at its
# end, token for token, and a reply's last token is the end that the policy itself wrote.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + (message.content | trim if message.role != 'assistant' else message.content)"
    " + '<|im_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def pieces() -> list[str]:
    """Every whole-word token, in id order, without repetition."""
    groups = (
        words.ROLE_PIECES, words.COMMAND_PIECES, words.INSTRUCTION_PIECES, words.OUTPUT_PIECES, words.DIRS, words.NAMES,
        words.EXTENSIONS, words.VALUES,
    )  # fmt: skip
    return list(dict.fromkeys(piece for group in groups for piece in group if len(piece) > 1))


def build() -> Tokenizer:
    byte_letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = [*words.SPECIALS, *byte_letters]
    for piece in pieces():
        [(letters, _)] = as_letters.pre_tokenize_str(piece)
        vocabulary.append(letters)
    if len(vocabulary) > VOCAB_SIZE:
        raise ValueError(f"{len(vocabulary)} tokens do not fit a vocabulary of {VOCAB_SIZE}")
    vocabulary += [f"<|unused{index}|>" for index in range(VOCAB_SIZE - len(vocabulary))]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[], ignore_merges=True)
    )
    longest_first = sorted(pieces(), key=lambda piece: (-len(piece), piece))
    known = Regex("|".join(re.escape(piece).replace("\\\n", "\n") for piece in longest_first))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(known, "isolated"), as_letters])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words.SPECIALS[:3]])
    # As in Qwen's tokenizers the tool-call tags are whole tokens, yet part of the text: a decoder that skips special tokens keeps them.
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words.SPECIALS[3:]])
    return tokenizer


def config() -> dict[str, object]:
    """tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "eos_token": words.IM_END,
        "pad_token": words.END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def render(messages: list[tuple[str, str]] | tuple[tuple[str, str], ...], *, reply_next: bool) -> str:
    """What CHAT_TEMPLATE renders, without jinja; a test holds the two together."""
    text = "".join(
        f"{words.IM_START}{role}\n{content if role == 'assistant' else content.strip()}{words.IM_END}"
        for role, content in messages
    )
    return text + (f"{words.IM_START}assistant\n" if reply_next else "")


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
