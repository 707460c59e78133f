"""Eight families of small repository tasks. Each hides a value that only a command can show.

A task's world is a handful of files two levels deep. It is solved when the world equals ``want``: the right change made, nothing
else touched. ``reads`` then ``writes`` is a solution; ``slips`` are wrong ways to write that look right.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from warmstart import toolbox
from warmstart.words import NAMES, VALUES


@dataclass(frozen=True)
class Task:
    family: str
    instruction: str
    files: dict[str, str]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    slips: tuple[tuple[str, ...], ...]
    hidden: str  # what the reads show; a guess puts another of `lures` in its place
    lures: tuple[str, ...]

    @property
    def dirs(self) -> frozenset[str]:
        return frozenset(path.split("/")[0] for path in self.files)

    @property
    def want(self) -> dict[str, str]:
        files = dict(self.files)
        for command in self.writes:
            result = toolbox.run(command, files, self.dirs)
            if result.code:
                raise ValueError(f"{self.instruction}: {command}: {result.output}")
            files = result.files
        return files


def make(family: str, rng: random.Random) -> Task:
    """A new task of ``family`` (one of FAMILIES), from ``rng`` alone."""
    return FAMILIES[family](_World(rng))


def _in_quotes(word: str) -> str:
    return f'"{word}"'


class _World:
    """Draws names and values without repetition, and collects files."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names = rng.sample(NAMES, len(NAMES))
        self.words = rng.sample(VALUES, len(VALUES))
        self.numbers = [str(number) for number in rng.sample(range(10, 100), 12)]
        self.files: dict[str, str] = {}

    def path(self, folder: str) -> str:
        suffix = {"src/": ".py", "logs/": ".log"}.get(folder, "")
        return folder + self.names.pop() + suffix

    def any_path(self, *folders: str) -> str:
        return self.path(self.rng.choice(folders))

    def value(self) -> tuple[str, tuple[str, ...]]:
        """A number or a word, and what a guess would say instead."""
        if self.rng.random() < 0.5:
            return self.numbers.pop(), tuple(str(number) for number in range(10, 100))
        return self.words.pop(), VALUES

    def put(self, path: str, *lines: str) -> str:
        self.files[path] = "".join(f"{line}\n" for line in lines)
        return path

    def assignment(self, value: str) -> str:
        return f"{self.rng.choice(NAMES)} = {value if value.isdigit() else _in_quotes(value)}"

    def clutter(self) -> dict[str, str]:
        """The files, with a few that the task does not need."""
        for folder in self.rng.sample(("conf/", "data/", "docs/", "src/", "tmp/"), 3):
            path = self.path(folder)
            if folder == "src/":
                self.put(path, self.assignment(self.numbers.pop()))
            else:
                self.put(path, self.words.pop() if self.rng.random() < 0.5 else self.numbers.pop())
        return dict(sorted(self.files.items()))


def _fill(world: _World) -> Task:
    value, lures = world.value()
    source = world.put(world.any_path("conf/", "data/"), value)
    target = world.put(world.any_path("data/", "docs/"), world.words.pop())
    return Task(
        family="fill",
        instruction=f"Write the value in {source} to {target}.",
        files=world.clutter(),
        reads=(f"cat {source}",),
        writes=(f"echo {value} > {target}",),
        slips=((f"echo {value} >> {target}",), (f"echo {value} > {source}",)),
        hidden=value,
        lures=lures,
    )


def _fix(world: _World) -> Task:
    old, value = world.numbers.pop(), world.numbers.pop()
    source = world.put(world.any_path("conf/", "data/"), value)
    lines = [world.assignment(old), world.assignment(world.numbers.pop())]
    world.rng.shuffle(lines)
    target = world.put(world.path("src/"), *lines)
    return Task(
        family="fix",
        instruction=f"In {target} replace {old} by the value in {source}.",
        files=world.clutter(),
        reads=(f"cat {source}",),
        writes=(f"sed -i s/{old}/{value}/ {target}",),
        slips=((f"sed s/{old}/{value}/ {target}",), (f"sed -i s/{old}/{value}/ {source}",)),
        hidden=value,
        lures=tuple(str(number) for number in range(10, 100)),
    )


def _append(world: _World) -> Task:
    value, lures = world.value()
    source = world.put(world.any_path("conf/", "data/"), value)
    target = world.put(world.path("logs/"), world.words.pop(), world.words.pop())
    return Task(
        family="append",
        instruction=f"Append the value in {source} to {target}.",
        files=world.clutter(),
        reads=(f"cat {source}",),
        writes=(f"echo {value} >> {target}",),
        slips=((f"echo {value} > {target}",), (f"echo {value} >> {source}",)),
        hidden=value,
        lures=lures,
    )


def _delete(world: _World) -> Task:
    stale = world.put(world.any_path("tmp/", "docs/"), world.words.pop())
    source = world.put(world.any_path("conf/", "data/"), stale)
    other = world.put(world.any_path("tmp/", "docs/"), world.words.pop())
    return Task(
        family="delete",
        instruction=f"Delete the file named in {source}.",
        files=world.clutter(),
        reads=(f"cat {source}",),
        writes=(f"rm {stale}",),
        slips=((f"rm {source}",), (f"rm {stale}", f"rm {source}")),
        hidden=stale,
        lures=(other, *(folder + name for folder in ("tmp/", "docs/") for name in NAMES)),
    )


def _rename(world: _World) -> Task:
    old = world.put(world.any_path("tmp/", "docs/"), world.words.pop())
    world.put(world.path("docs/"), world.words.pop())
    world.put(world.path("tmp/"), world.words.pop())
    new = world.any_path("tmp/", "docs/")
    source = world.put(world.any_path("conf/", "data/"), new)
    return Task(
        family="rename",
        instruction=f"Rename {old} to the name in {source}.",
        files=world.clutter(),
        reads=(f"cat {source}",),
        writes=(f"mv {old} {new}",),
        slips=((f"mv {old} {source}",), (f"mv {new} {old}",)),
        hidden=new,
        lures=tuple(folder + name for folder in ("tmp/", "docs/") for name in NAMES),
    )


def _search(world: _World) -> Task:
    old, new = world.words.pop(), world.words.pop()
    paths = [world.path("src/") for _ in range(3)]
    target = world.rng.choice(paths)
    for path in paths:
        world.put(path, world.assignment(old if path == target else world.words.pop()))
    return Task(
        family="search",
        instruction=f"Replace {old} by {new} in the file in src/ that has it.",
        files=world.clutter(),
        reads=(f"grep -l {old} src/*",),
        writes=(f"sed -i s/{old}/{new}/ {target}",),
        slips=((f"sed s/{old}/{new}/ {target}",), (f"sed -i s/{new}/{old}/ {target}",)),
        hidden=target,
        lures=tuple(f"src/{name}.py" for name in NAMES),
    )


def _follow(world: _World) -> Task:
    value, lures = world.value()
    middle = world.put(world.any_path("data/", "docs/"), value)
    source = world.put(world.path("conf/"), middle)
    target = world.put(world.any_path("data/", "docs/"), world.words.pop())
    return Task(
        family="follow",
        instruction=f"Write the value in the file named in {source} to {target}.",
        files=world.clutter(),
        reads=(f"cat {source}", f"cat {middle}"),
        writes=(f"echo {value} > {target}",),
        slips=((f"echo {value} >> {target}",), (f"echo {middle} > {target}",)),
        hidden=value,
        lures=lures,
    )


def _both(world: _World) -> Task:
    value, lures = world.value()
    source = world.put(world.any_path("conf/", "data/"), value)
    target = world.put(world.any_path("data/", "docs/"), world.words.pop())
    stale = world.put(world.path("tmp/"), world.words.pop())
    return Task(
        family="both",
        instruction=f"Write the value in {source} to {target} and delete {stale}.",
        files=world.clutter(),
        reads=(f"cat {source}",),
        writes=(f"echo {value} > {target}", f"rm {stale}"),
        slips=((f"echo {value} > {target}",), (f"echo {value} > {target}", f"rm {source}")),
        hidden=value,
        lures=lures,
    )


FAMILIES: dict[str, Callable[[_World], Task]] = {
    "fill": _fill,
    "fix": _fix,
    "append": _append,
    "delete": _delete,
    "rename": _rename,
    "search": _search,
    "follow": _follow,
    "both": _both,
}
