"""The demo's small world in words: one list each, shared by tasks, demonstrator and tokenizer."""

from __future__ import annotations

DIRS = ("conf/", "data/", "docs/", "logs/", "src/", "tmp/")
NAMES = (
    "port", "limit", "key", "user", "host", "size", "mode", "level", "rate", "depth", "list", "plan",
    "note", "cache", "queue", "index", "state", "token", "theme", "title", "path", "page", "task", "node",
)  # fmt: skip
VALUES = (
    "red", "blue", "green", "gold", "fox", "owl", "bear", "wolf", "oak", "pine", "iron", "zinc",
    "salt", "mint", "rain", "wind",
)  # fmt: skip
EXTENSIONS = (".py", ".log")

# Pieces of commands; a space belongs to the piece before it, so that a path or value is the same token wherever it stands.
COMMAND_PIECES = (
    "cat ", "echo ", "sed ", "-i ", "s/", "/ ", "/", "rm ", "mv ", "grep ", "-l ", "ls ", "submit", " > ", " >> ",
    "*", " = ", " ", "\n",
)  # fmt: skip
INSTRUCTION_PIECES = (
    "Write ", "Append ", "Delete ", "Rename ", "Find ", "Replace ", "In ", " in ", "in ", " to ", " by ", " and ",
    "replace ", "delete ", "the ", "value ", "file ", "name ", "named ", "that ", "has ", "it", ".",
)  # fmt: skip
OUTPUT_PIECES = (
    "ok", "exit ", "error: ", "no tool call", "cat: ", "sed: ", "rm: ", "mv: ", "grep: ", "ls: ", "bash: ", "line 1: ",
    ": No such file or directory", ": Is a directory", ": command not found", "can't read ", "cannot remove '",
    "cannot stat '", "cannot access '", "'",
)  # fmt: skip
ROLE_PIECES = ("system\n", "user\n", "assistant\n", "tool\n")

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
SPECIALS = (END_OF_TEXT, IM_START, IM_END, TOOL_CALL, TOOL_CALL_END)
