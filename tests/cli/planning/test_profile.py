"""`lowtide profile` from words to its page; the page in a real browser, where there is one."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.cli.main import main
from lowtide.planner.advice import Advice
from lowtide.planner.estimate import Estimate
from lowtide.planner.profiling.profile import Profile, ProfiledRun, Span, Tensors, ticks
from lowtide.planner.profiling.profile_page import html_of
from lowtide.trainers import predictions
from tests.support.pages.browser import CHROMIUM

MIB = 1 << 20


@pytest.fixture
def profile(model, data, tmp_path, capsys):
    """Runs `lowtide profile sft` on the tiny model; gives status, standard output and error."""

    def run(*words: str) -> tuple[int, str, str]:
        always = ["--model", str(model), "--dataset", str(data), "--output", str(tmp_path / "report")]
        status = main(["profile", "sft", *always, "--use_cpu", "--disable_tqdm", *words])
        return status, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_it_writes_numbers_a_picture_and_a_page(profile, tmp_path, monkeypatch):
    asked = []

    def estimated(size: int) -> Estimate:
        phases = {"forward": {"weights": 10 * MIB}, "backward": {"weights": size * MIB, "runtime": 670 * MIB}}
        return Estimate(700 * MIB, "backward", phases, "cpu")

    def predicted(_trainer, changes, beside) -> list[Estimate]:
        asked.extend(dict(settings) for settings in changes)
        return [estimated(20 if settings else 30) for settings in changes]

    monkeypatch.setattr(predictions, "predicted", predicted)
    status, out, err = profile("--steps", "2", "--per_device_train_batch_size", "4", "--save_steps", "1")
    assert status == 0, err
    report = tmp_path / "report"
    written = {path.name for path in report.iterdir()} - {"metrics.jsonl", "report.html"}  # as each run writes
    assert written == {"profile.html", "profile.json", "profile.png"}
    found = json.loads((report / "profile.json").read_text())
    assert found["run"]["steps"] == 2
    assert found["peak_bytes"] == sum(found["phases"][found["peak_phase"]].values())
    assert max(map(sum, zip(*found["bytes"].values(), strict=True))) == found["peak_bytes"]
    assert {"forward", "head", "backward", "optimizer"} <= set(found["phases"])
    assert {span["step"] for span in found["spans"]} == {0, 1, 2}
    assert (found["predicted_bytes"], found["predicted_phase"]) == (30 * MIB, "backward")
    assert len(found["tensors"]) == 10
    sizes = [tensor["bytes"] for tensor in found["tensors"]]
    assert sizes == sorted(sizes, reverse=True)
    assert asked[0] == {}
    assert {each["peak_bytes"] for each in found["advice"]} == {20 * MIB}
    assert found["predicted_process_bytes"] == 700 * MIB
    assert f"({found['advice'][0]['saves']}); predicted peak of tensors 20.0 MiB (-33.3%)" in out
    assert "Tensors predicted: 30.0 MiB (" in out
    assert "Process predicted: 700.0 MiB (" in out


def test_a_run_that_cannot_be_predicted_says_why(profile, tmp_path, monkeypatch):
    def refuse(_trainer, changes, beside) -> list[ValueError]:
        return [ValueError("this is not <traceable>")] * len(changes)

    monkeypatch.setattr(predictions, "predicted", refuse)
    assert profile("--steps", "1")[0] == 0
    found = json.loads((tmp_path / "report" / "profile.json").read_text())
    assert found["not_predicted"] == "this is not <traceable>"
    assert found["predicted"] is None
    assert found["advice"]
    assert "this is not &lt;traceable&gt;" in (tmp_path / "report" / "profile.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile"], "a method is missing: lowtide profile METHOD"),
        (["profile", "sfft"], "there is no method 'sfft'; did you mean 'sft'?"),
        (["profile", "sft", "--steps", "0"], "argument --steps: must be a whole number from 1 on, not '0'"),
        (["profile", "sft", "--stepz", "1"], "there is no option --stepz; did you mean '--steps'?"),
        (["profile", "sft", "--simpo_gamma", "1"], "there is no option --simpo_gamma: it is of"),
        (["profile", "sft"], "--model is missing"),
    ],
)
def test_what_means_nothing_is_said(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_help_names_the_methods(capsys):
    assert main(["profile", "--help"]) == 0
    assert "reward" in capsys.readouterr().out


def test_ticks_are_round_and_end_below_the_top():
    assert ticks(208 * MIB) == {f"{n} MiB": n * MIB for n in (0, 50, 100, 150, 200)}
    assert list(ticks(3 << 30)) == ["0 GiB", "1 GiB", "2 GiB", "3 GiB"]
    assert list(ticks(10)) == ["0 B", "2 B", "4 B", "6 B", "8 B", "10 B"]


EVIL = "</script><img src=x onerror=alert(1)>'\"&"


def made(advice: tuple[Advice, ...] = ()) -> Profile:
    return Profile(
        run=ProfiledRun("SFT", EVIL, "cpu", "2.13", 2, 500 * MIB),
        peak_bytes=120 * MIB,
        peak_seconds=1.5,
        peak_step=1,
        peak_phase="backward",
        phases={"forward": {"weights": 60 * MIB}, "backward": {"weights": 70 * MIB, "activations": 50 * MIB}},
        seconds=[0.0, 1.0, 1.5, 2.0],
        bytes={"weights": [60 * MIB] * 4, "activations": [0, 30 * MIB, 60 * MIB, 0]},
        spans=[Span(0.0, 1.2, 1, "forward"), Span(1.2, 3.0, 1, "backward")],
        tensors=[Tensors(MIB, 3, (4, 5), "float32", "activations", "forward", EVIL, EVIL)],
        predicted={"backward": {"weights": 60 * MIB}},
        predicted_process_bytes=525 * MIB,
        advice=advice,
    )


def test_the_page_escapes_what_it_is_given_and_asks_nothing_of_the_network():
    page = html_of(made((Advice(EVIL, {"a": EVIL}, "activations", EVIL, EVIL, 90 * MIB),)))
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert not re.search(r"https?://|@import|url\(", page)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["words"] == ["forward of step 1", "backward of step 1"]


def test_the_page_compares_tensors_with_tensors_and_the_process_with_the_process():
    page = html_of(made())
    tiles = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page)
    assert ("tensors predicted", "60.0 MiB (-50.0%)") in tiles
    assert ("process at most", "500.0 MiB") in tiles
    assert ("process predicted", "525.0 MiB (+5.0%)") in tiles


def test_bars_are_as_long_as_what_they_stand_for():
    measured, predicted = re.findall(r'<div class="stack">(.*?)</div>', html_of(made()))
    widths = [sum(map(float, re.findall(r"width:([\d.]+)%", bar))) for bar in (measured, predicted)]
    assert widths == [pytest.approx(100, abs=0.02), pytest.approx(50, abs=0.02)]


def test_the_page_says_when_nothing_lowers_the_largest_category():
    said = "No setting that is not on already lowers the largest category: weights, 58% of the peak."
    other = Advice("a", {"a": 1}, "activations", "them", None, 40 * MIB)
    assert said in html_of(made((other,)))
    assert said in html_of(made())
    assert said not in html_of(made((replace(other, category="weights"), other)))


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium, which this machine does not have")
@pytest.mark.parametrize("width", [380, 1280])
def test_in_a_browser_the_pointer_tells_what_was_held(tmp_path: Path, width: int):
    """The page itself reports what it shows, as its title."""
    probe = """<script>
const box = document.querySelector("#timeline .frame").getBoundingClientRect();
frame.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width * 0.55}));
const tipBox = tip.getBoundingClientRect();
document.title = JSON.stringify({
  tip: tip.innerText.split("\\n").filter(Boolean), inside: tipBox.left >= 0 && tipBox.right <= innerWidth,
  wide: document.documentElement.scrollWidth <= innerWidth, injected: document.querySelectorAll("img").length,
  areas: [...document.querySelectorAll("#timeline path")].map((each) => each.getBoundingClientRect().height > 0),
});
</script>"""
    page, frame = tmp_path / "page.html", tmp_path / "frame.html"
    page.write_text(html_of(made()).replace("</body>", probe + "</body>"), encoding="utf-8")
    # Windows have a smallest width, frames have none.
    frame.write_text(
        f'<iframe id="f" src="page.html" style="width:{width}px;height:2000px;border:0"></iframe><script>'
        "f.onload = () => { document.body.append(f.contentDocument.title); };</script>"
    )
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
             f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--window-size=1400,2100",
             "--dump-dom", frame.as_uri()]  # fmt: skip
    out = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
    told = json.loads(re.search(r"</script>(\{.*\})", out)[1].replace("&amp;", "&"))
    tip = ["backward of step 1", "1.65 s", "120.0 MiB", "activations", "60.0 MiB", "weights", "60.0 MiB"]
    assert told == {"tip": tip, "inside": True, "wide": True, "injected": 0, "areas": [True, True]}
