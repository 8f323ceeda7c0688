"""Environments that TRL's specs of task suites describe: what a spec gives is what a trainer takes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowtide.rollout.environments import Environments
from tests.rollout.chat_templates import HERMES_TEMPLATE
from tests.support.models.tiny_models import build
from tests.support.runs.online_runs import online
from tests.support.texts.byte_tokenizer import byte_tokenizer

harbor: Any = pytest.importorskip("trl.experimental.harbor", reason="the specs are TRL's: install the bench extra")


class Sandboxed(harbor.HarborEnv):
    """A harness whose sandbox and verifier are here, in the place of Harbor's."""

    PROMPT_SUFFIX = " Use look."

    async def _start(self, task_dir: str) -> str:
        self._env = Path(task_dir)
        return (Path(task_dir) / "instruction.md").read_text()

    async def _verify(self) -> float:
        assert self._env is not None
        return float(len((self._env / "instruction.md").read_text()))

    async def _stop(self) -> None:
        self._env = None

    def look(self) -> str:
        """
        Looks around.
        """
        return "nothing"


def made(folder: Path, factory: Any, *, max_steps: int, **arguments: Any) -> Any:
    """A run on prompts of a spec, a prompt a step."""
    codes = byte_tokenizer(HERMES_TEMPLATE, eos="<|im_end|>")
    given = {"environment_factory": factory, "processing_class": codes, **arguments}
    options = {"max_steps": max_steps, "per_device_train_batch_size": 4, "max_completion_length": 4}
    return online(folder, model=build("llama", vocab_size=len(codes)), arguments=given, **options)


def tasks(folder: Path) -> str:
    for number in range(3):
        task = folder / "suite" / "tasks" / f"task-{number}"
        task.mkdir(parents=True)
        (task / "task.toml").write_text(f'[metadata]\ngold_answer = "{number}"\ndifficulty_level = "easy"\n')
        (task / "instruction.md").write_text(f"What is {number} + 1?" + "!" * number)
    return str(folder / "suite")


def test_a_harbor_spec_gives_rows_environments_and_rewards(tmp_path):
    spec = harbor.HarborSpec(tasks(tmp_path), agent=Sandboxed)
    seen: list[str] = []

    def asked(prompts, gold_answer, **_):
        seen.extend(prompt[-1]["content"] for prompt in prompts)
        return [float(each) for each in gold_answer]

    trainer = made(
        tmp_path / "run",
        spec.environment_factory,
        train_dataset=spec.train_dataset,
        reward_funcs=[spec.reward_funcs, asked],
        max_steps=3,
    )
    trainer.train()
    rewards = [each["rewards/_outcome_reward_func/mean"] for each in trainer.state.log_history if "reward" in each]
    assert sorted(rewards) == [len("What is 0 + 1?") + number for number in range(3)]
    assert sorted(seen) == sorted([f"What is {n} + 1?" + "!" * n + " Use look." for n in range(3)] * 4)


def test_where_harbor_is_missing_the_run_says_so(tmp_path):
    if find_spec("harbor") is not None:
        pytest.skip("harbor is installed")
    spec = harbor.HarborSpec(tasks(tmp_path))
    rows: dict[str, Any] = {"train_dataset": spec.train_dataset, "reward_funcs": spec.reward_funcs}
    trainer = made(tmp_path / "run", spec.environment_factory, **rows, max_steps=1)
    with pytest.raises(
        ValueError, match=r"reset of the environment HarborBashEnv raised ModuleNotFoundError: .*harbor"
    ):
        trainer.train()


# -- OpenReward --------------------------------------------------------------------------------------------------------

SUBMIT = {
    "name": "submit",
    "description": "Hands in an answer.",
    "input_schema": {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The answer."}},
        "required": ["answer"],
    },
}


@dataclass
class Session:
    """One task of a server's, which is here."""

    index: int

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def list_tools(self) -> list[Any]:
        return [SUBMIT]

    def get_prompt(self) -> list[Any]:
        return [{"type": "text", "text": f"What is {self.index} + 1?"}]

    def call_tool(self, name: str, given: dict[str, Any]) -> Any:
        reward = float(given["answer"] == str(self.index + 1))
        return SimpleNamespace(blocks=[{"type": "text", "text": name}], reward=reward, metadata=None, finished=True)


class Server:
    """An environment of a server's, in the place of the SDK's."""

    def list_tools(self) -> list[Any]:
        return [SUBMIT]

    def num_tasks(self, split: str) -> int:
        return 3

    def list_tasks(self, split: str) -> list[Any]:
        return [{"level": number} for number in range(3)]

    def session(self, *, split: str, index: int, secrets: Any) -> Session:
        return Session(index)


@pytest.fixture
def spec(monkeypatch) -> Any:
    found: Any = pytest.importorskip("trl.experimental.openreward")
    client = SimpleNamespace(environments=SimpleNamespace(get=lambda name: Server()))
    monkeypatch.setitem(sys.modules, "openreward", SimpleNamespace(OpenReward=lambda **_: client))
    return found.OpenRewardSpec("http://localhost:1")


def test_an_openreward_spec_gives_rows_tools_and_rewards(spec):
    environments = Environments(spec.environment_factory)
    rows = list(spec.train_dataset)
    assert [tool["function"]["name"] for tool in environments.schemas(rows[0])] == ["submit"]
    taken = environments.take(rows)
    prompts = [environments.reset(each, row, row["prompt"]) for each, row in zip(taken, rows, strict=True)]
    assert [prompt[-1]["content"] for prompt in prompts] == [f"What is {number} + 1?" for number in range(3)]
    assert environments.tools_of(taken[0])["submit"](answer="1") == "submit"
    environments.tools_of(taken[1])["submit"](answer="1")
    assert spec.reward_funcs(environments=taken) == [1.0, 0.0, None]


def test_a_run_on_an_openreward_spec(spec, tmp_path):
    rows: dict[str, Any] = {"train_dataset": spec.train_dataset, "reward_funcs": [spec.reward_funcs, by_level]}
    trainer = made(tmp_path, spec.environment_factory, **rows, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["reward"] in (0.0, 1.0, 2.0)


def by_level(level: list[int], **_: Any) -> list[float]:
    return [float(each) for each in level]
