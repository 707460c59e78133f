"""The commands that the demonstrator uses, on a dictionary instead of a disk.

``run`` answers what bash with coreutils, sed and grep answers (C locale); a test holds it against real bash. It exists for speed:
the warm start needs tens of thousands of episodes. A command outside this small language raises ``UnsupportedError``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

Files = Mapping[str, str]  # path -> content; a directory exists while some path lies in it, or is named in `dirs`

_SED = re.compile(r"s/([A-Za-z0-9=. ]+)/([A-Za-z0-9=. ]*)/")
_PATH = re.compile(r"[A-Za-z0-9_.]+(?:/[A-Za-z0-9_.]+)*/?")


class UnsupportedError(ValueError):
    """The command is not in the small language."""


@dataclass(frozen=True)
class Result:
    output: str  # standard output and standard error in the order written
    code: int
    files: dict[str, str]


def run(command: str, files: Files, dirs: frozenset[str]) -> Result:
    """One command in the workspace. ``dirs`` are its top folders without slash; they never vanish."""
    words = command.split(" ")
    if "" in words or not words:
        raise UnsupportedError(command)
    if len(words) >= 3 and words[-2] in (">", ">>"):
        return _redirect(words, files, dirs)
    name, args = words[0], words[1:]
    if name in _COMMANDS and args:
        return _COMMANDS[name](args, files, dirs)
    raise UnsupportedError(command)


def tool_message(result: Result, limit_chars: int = 2000) -> str:
    """What the policy sees: output, then ``exit N`` when the code is not 0; ``ok`` when there is nothing to show."""
    shown = result.output[:limit_chars].rstrip("\n")
    if result.code:
        shown = f"{shown}\nexit {result.code}" if shown else f"exit {result.code}"
    return shown or "ok"


def _path(word: str) -> str:
    if not _PATH.fullmatch(word) or ".." in word.split("/"):
        raise UnsupportedError(word)
    return word


def _is_dir(path: str, dirs: frozenset[str]) -> bool:
    return path.rstrip("/") in dirs


def _missing_parent(path: str, dirs: frozenset[str]) -> bool:
    parent, slash, _ = path.rpartition("/")
    return bool(slash) and parent not in dirs


def _redirect(words: list[str], files: Files, dirs: frozenset[str]) -> Result:
    operator, target = words[-2], _path(words[-1])
    inner = words[:-2]
    if any(word in (">", ">>") for word in inner):
        raise UnsupportedError(" ".join(words))
    if _is_dir(target, dirs):
        return Result(f"bash: line 1: {target}: Is a directory\n", 1, dict(files))
    if target.endswith("/") or _missing_parent(target, dirs) or any(target.startswith(path + "/") for path in files):
        if target.endswith("/") or any(target.startswith(path + "/") for path in files):
            raise UnsupportedError(target)
        return Result(f"bash: line 1: {target}: No such file or directory\n", 1, dict(files))
    if inner[0] != "echo":
        raise UnsupportedError(" ".join(words))
    text = _echo(inner[1:])
    changed = dict(files)
    changed[target] = (files.get(target, "") if operator == ">>" else "") + text
    return Result("", 0, changed)


def _echo(args: list[str]) -> str:
    if any(not re.fullmatch(r"[A-Za-z0-9_./=]+", arg) for arg in args):
        raise UnsupportedError(" ".join(args))
    return " ".join(args) + "\n"


def _run_echo(args: list[str], files: Files, dirs: frozenset[str]) -> Result:
    return Result(_echo(args), 0, dict(files))


def _cat(args: list[str], files: Files, dirs: frozenset[str]) -> Result:
    output, code = "", 0
    for path in map(_path, args):
        if path in files:
            output += files[path]
        else:
            output += f"cat: {path}: {_why_not(path, files, dirs)}\n"
            code = 1
    return Result(output, code, dict(files))


def _why_not(path: str, files: Files, dirs: frozenset[str]) -> str:
    if _is_dir(path, dirs):
        return "Is a directory"
    if path.rstrip("/") in files or any(path.startswith(f"{other}/") for other in files):
        raise UnsupportedError(path)  # "Not a directory"
    return "No such file or directory"


def _sed(args: list[str], files: Files, dirs: frozenset[str]) -> Result:
    in_place = args[0] == "-i"
    args = args[in_place:]
    if len(args) != 2 or not (match := _SED.fullmatch(args[0])):
        raise UnsupportedError(" ".join(args))
    path = _path(args[1])
    if path not in files:
        if _why_not(path, files, dirs) == "Is a directory":
            raise UnsupportedError(path)
        return Result(f"sed: can't read {path}: No such file or directory\n", 2, dict(files))
    pattern = re.compile(match[1].replace(".", r"[^\n]"))
    text = "".join(pattern.sub(match[2], line, count=1) for line in files[path].splitlines(keepends=True))
    if in_place:
        return Result("", 0, {**files, path: text})
    return Result(text, 0, dict(files))


def _rm(args: list[str], files: Files, dirs: frozenset[str]) -> Result:
    if len(args) != 1:
        raise UnsupportedError(" ".join(args))
    path = _path(args[0])
    if path in files:
        return Result("", 0, {other: text for other, text in files.items() if other != path})
    return Result(f"rm: cannot remove '{path}': {_why_not(path, files, dirs)}\n", 1, dict(files))


def _mv(args: list[str], files: Files, dirs: frozenset[str]) -> Result:
    if len(args) != 2:
        raise UnsupportedError(" ".join(args))
    source, target = map(_path, args)
    if source not in files:
        if _why_not(source, files, dirs) == "Is a directory":
            raise UnsupportedError(source)
        return Result(f"mv: cannot stat '{source}': No such file or directory\n", 1, dict(files))
    if source == target or target.endswith("/") or _missing_parent(target, dirs) or _is_dir(target, dirs):
        raise UnsupportedError(target)
    changed = dict(files)
    changed[target] = changed.pop(source)
    return Result("", 0, changed)


def _grep(args: list[str], files: Files, dirs: frozenset[str]) -> Result:
    if len(args) != 3 or args[0] != "-l" or not re.fullmatch(r"[A-Za-z0-9]+", args[1]):
        raise UnsupportedError(" ".join(args))
    word, where = args[1], args[2]
    if where.endswith("/*") and _is_dir(where[:-2], dirs):
        paths = sorted(path for path in files if path.startswith(where[:-1]))
        if not paths:
            raise UnsupportedError(where)
    else:
        paths = [_path(where)]
        if paths[0] not in files:
            if _why_not(paths[0], files, dirs) == "Is a directory":
                raise UnsupportedError(where)
            return Result(f"grep: {where}: No such file or directory\n", 2, dict(files))
    found = [path for path in paths if word in files[path]]
    return Result("".join(f"{path}\n" for path in found), 0 if found else 1, dict(files))


def _ls(args: list[str], files: Files, dirs: frozenset[str]) -> Result:
    if len(args) != 1:
        raise UnsupportedError(" ".join(args))
    path = _path(args[0])
    if _is_dir(path, dirs):
        inside = sorted(other.split("/", 1)[1] for other in files if other.startswith(path.rstrip("/") + "/"))
        return Result("".join(f"{name}\n" for name in inside), 0, dict(files))
    if path in files:
        return Result(f"{path}\n", 0, dict(files))
    _why_not(path, files, dirs)
    return Result(f"ls: cannot access '{path}': No such file or directory\n", 2, dict(files))


_COMMANDS = {
    "cat": _cat, "echo": _run_echo, "sed": _sed, "rm": _rm, "mv": _mv, "grep": _grep, "ls": _ls,
}  # fmt: skip
