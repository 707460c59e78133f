"""Episodes of one step on the emulated fleet: the demo's tasks, the rollout worker's own loop turned inside out.

Sessions of one engine take their turns together, so that each turn is one batch: prompts, then one token of every reply at a time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from motley_api.records import EndedBy, Trajectory
from motley_sampler.engines.protocol import SamplingParams
from motley_sampler.rollout.language import Language
from motley_sampler.rollout.reply import Reply
from motley_sampler.rollout.toolcall import Command, FormatError, Submit, parse_reply
from motley_sampler.rollout.transcript import Transcript
from warmstart import families, toolbox

from benchmarks.study.plan import REFRESH_STEPS, Engine, Settings
from benchmarks.study.sampling import Fleet, Prompt
from benchmarks.study.versions import steps_due

FORMAT_ERRORS_IN_ROW = 3


@dataclass
class Episode:
    """One sample of one prompt, on one engine for life."""

    id: str
    work: str
    sample: int
    task: families.Task
    files: dict[str, str]
    transcript: Transcript = field(default_factory=Transcript)
    errors_in_row: int = 0
    ended_by: EndedBy | None = None

    def answer(self, reply: Reply | None, language: Language, settings: Settings) -> None:
        """Acts on one reply, as motley_sampler.rollout.episode does."""
        if reply is None:
            self.ended_by = EndedBy.INFRASTRUCTURE
            return
        action = parse_reply(language.decode(reply.token_ids))
        self.transcript.add_reply(reply, latency_s=0.0, tool_call=not isinstance(action, FormatError))
        match action:
            case Submit():
                self.ended_by = EndedBy.SUBMIT
                return
            case FormatError(result):
                self.errors_in_row += 1
                if self.errors_in_row >= FORMAT_ERRORS_IN_ROW:
                    self.ended_by = EndedBy.FORMAT_ERRORS
                    return
            case Command(text):
                self.errors_in_row = 0
                result = self._run(text)
        self.transcript.add_context(language.after_reply(reply.token_ids, result))
        if len(self.transcript.turns) >= settings.turns:
            self.ended_by = EndedBy.MAX_TURNS
        elif len(self.transcript.token_ids) + settings.tokens_per_turn > settings.context_tokens:
            self.ended_by = EndedBy.CONTEXT

    def _run(self, command: str) -> str:
        try:
            result = toolbox.run(command, self.files, self.task.dirs)
        except toolbox.UnsupportedError:
            return "exit 2"
        self.files = result.files
        return toolbox.tool_message(result)

    @property
    def reward(self) -> float | None:
        if self.ended_by is EndedBy.INFRASTRUCTURE:
            return None
        return float(self.ended_by is not EndedBy.FORMAT_ERRORS and self.files == self.task.want)


class Rollouts:
    """Episodes of every step, drawn as early as each engine's refreshes say."""

    def __init__(
        self, fleet: Fleet, language: Language, settings: Settings, sampling: SamplingParams, *, run: str, seed: int
    ) -> None:
        self._fleet, self._language = fleet, language
        self._settings, self._sampling = settings, sampling
        self._run, self._seed = run, seed
        self._ready: defaultdict[int, list[Trajectory]] = defaultdict(list)

    def at(self, step: int) -> list[Trajectory]:
        """The samples of a step, by prompt; steps must be asked for in order."""
        for index, engine in enumerate(self._fleet.engines):
            due = steps_due(step, phase=engine.phase, period=REFRESH_STEPS)
            if due:
                self._fleet.refresh(index)
                self._draw(index, engine, due)
        found = self._ready.pop(step)
        return sorted(found, key=lambda record: (int(record.work.split("-")[1]), record.sample))

    def _draw(self, index: int, engine: Engine, steps: Iterable[int]) -> None:
        dealt = {step: self._episodes(step, index) for step in steps if step <= self._settings.steps}
        everything = [episode for episodes in dealt.values() for episode in episodes]
        rng = random.Random(f"{self._seed}/{min(dealt, default=0)}/{index}")
        while live := [episode for episode in everything if episode.ended_by is None]:
            prompts = [Prompt(list(e.transcript.token_ids), e.id, rng.getrandbits(31)) for e in live]
            replies = self._fleet.generate(index, prompts, self._sampling)
            for episode, reply in zip(live, replies, strict=True):
                episode.answer(reply, self._language, self._settings)
        for step, episodes in dealt.items():
            self._ready[step] += [_record(episode, engine, index, self._sampling, self._run) for episode in episodes]

    def _episodes(self, step: int, index: int) -> list[Episode]:
        """Of a step's fresh tasks, `samples_per_prompt` episodes each: those that are dealt to one engine."""
        settings, rng = self._settings, random.Random(f"{self._seed}/{step}")
        tasks = [families.make(rng.choice(list(families.FAMILIES)), rng) for _ in range(settings.prompts)]
        places = [
            (prompt, sample) for prompt in range(settings.prompts) for sample in range(settings.samples_per_prompt)
        ]
        rng.shuffle(places)
        first = sum(engine.samples for engine in self._fleet.engines[:index])
        return [
            _episode(f"{step}-{prompt}", sample, tasks[prompt], self._language)
            for prompt, sample in places[first : first + self._fleet.engines[index].samples]
        ]


def _episode(work: str, sample: int, task: families.Task, language: Language) -> Episode:
    episode = Episode(f"{work}/{sample}", work, sample, task, dict(task.files))
    episode.transcript.add_context(language.opening(task.instruction))
    return episode


def _record(episode: Episode, engine: Engine, index: int, sampling: SamplingParams, run: str) -> Trajectory:
    assert episode.ended_by is not None
    return Trajectory(
        id=episode.id,
        run=run,
        work=episode.work,
        sample=episode.sample,
        task=episode.task.family,
        group=engine.group,
        view=engine.view,
        engine=f"{engine.group}-{index}",
        token_ids=episode.transcript.token_bytes(),
        turns=episode.transcript.turns,
        logprobs=episode.transcript.logprob_bytes(),
        candidates=episode.transcript.candidates(),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        reward=episode.reward,
        ended_by=episode.ended_by,
        started_unix_s=0.0,
        finished_unix_s=0.0,
    )
