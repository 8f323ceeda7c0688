"""The page of a `Profile` (see `lowtide.html_shell`): the timeline, the peak and what it is made of, what to change
first.

Names come from users' models, files and paths: all of them are escaped. The timeline's numbers lie in the page as
JSON, of which a small script tells those under the pointer; without it the page lacks nothing else.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from lowtide.html_shell import facts, page
from lowtide.memory.allocators.measure import bytes_text
from lowtide.own_files import write_output
from lowtide.planner.advice import Advice
from lowtide.planner.profiling.profile import Profile, Span, Tensors, ticks, totals
from lowtide.planner.profiling.recording import CATEGORIES

NARROW = 0.004
"""The share of the timeline below which a step has no room for its name."""


def write_html(profile: Profile, path: Path) -> None:
    """Write the page to a file."""
    write_output(path, html_of(profile))


def html_of(profile: Profile) -> str:
    """The page."""
    run, here = profile.run, files("lowtide.planner.profiling")
    style, script = (here.joinpath(f"profile_page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return page(
        f"Memory profile of {run.model}",
        f"""<h1>Memory profile</h1>
<p class="about"><b>{escape(run.method)}</b> of <b>{escape(run.model)}</b> on {escape(run.device)}, \
{run.steps} steps, torch {escape(run.torch)}</p>
<section class="advice">
<p class="label">Tensors held at most</p>
<p class="value">{bytes_text(profile.peak_bytes)}</p>
<p>in {escape(profile.peak_phase)} {_when(profile.peak_step)}{_largest_share(profile)}</p>
</section>
{facts(_facts(profile))}
<h2>What to change first</h2>
{_advice(profile)}
<h2>Living tensors over time</h2>
{_timeline(profile)}
<h2>What the peak is made of</h2>
{_bars(profile)}
<h2>The peak of each phase</h2>
{_phases(profile)}
<h2>The largest tensors at the peak</h2>
{_tensors(profile)}""",
        style=style + "".join(f".{name} {{ --its: var(--{name}); }}\n" for name in CATEGORIES),
        script=script,
    )


def _when(step: int) -> str:
    return f"of step {step}" if step else "of the rehearsal, before the first step"


def _largest_share(profile: Profile) -> str:
    name = profile.largest_category
    return f"; {profile.at_peak[name] / profile.peak_bytes:.0%} of it {escape(name)}"


def _facts(profile: Profile) -> dict[str, str]:
    longest = max(profile.spans, key=lambda span: span.end - span.start, default=None)
    return totals(profile) | ({"longest phase": longest.phase} if longest else {})


# -- the timeline -----------------------------------------------------------------------------------------------------


def _timeline(profile: Profile) -> str:
    end = max(profile.seconds[-1], profile.spans[-1].end if profile.spans else 0.0, 1e-9)
    top, marks = max(1.1 * profile.peak_bytes, 1), ticks(profile.peak_bytes)
    layers, below = [], [0] * len(profile.seconds)
    for name, sizes in profile.bytes.items():
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        layers.append(f'<path class="{name}" d="{_area(profile, below, above, end, top)}"/>')
        below = above
    at = 100 * profile.peak_seconds / end
    side = "left" if at > 50 else "right"
    peak = f'<i class="best {side}" style="left:{at:.2f}%"><b>{bytes_text(profile.peak_bytes)}</b></i>'
    sides = "".join(f'<span style="bottom:{100 * size / top:.2f}%">{text}</span>' for text, size in marks.items())
    rules = "".join(f'<i class="rule" style="bottom:{100 * size / top:.2f}%"></i>' for size in marks.values())
    downs = "".join(
        f'<span class="{"spare" if part % 2 else ""}" style="left:{25 * part}%">{end * part / 4:.3g} s</span>'
        for part in range(5)
    )
    return f"""{_legend(profile.bytes)}
<figure id="timeline" role="img" aria-label="Bytes of living tensors over time, by category">
<div class="side">{sides}</div>
<div class="frame">{rules}<svg viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(layers)}</svg>{peak}\
<i class="cursor" hidden></i><div class="tip" hidden></div></div>
<div class="strip">{_strip(profile.spans, end)}</div>
<div class="down">{downs}</div>
</figure>
<p class="legend phases">{_phase_legend(profile.spans)}</p>
<script type="application/json" id="data">{_data(profile, end, top)}</script>"""


def _area(profile: Profile, below: Sequence[int], above: Sequence[int], end: float, top: float) -> str:
    """A path in percent: levels hold until the next event."""
    across = [f"{100 * seconds / end:.2f}" for seconds in (*profile.seconds, end)]
    lower, upper = ([f"{100 - 100 * level / top:.2f}" for level in levels] for levels in (below, above))
    there = "".join(f"V{up}H{to}" for up, to in zip(upper, across[1:], strict=True))
    back = "".join(f"V{up}H{to}" for up, to in zip(reversed(lower), reversed(across[:-1]), strict=True))
    return f"M{across[0]} {lower[0]}{there}{back}Z"


def _strip(spans: Sequence[Span], end: float) -> str:
    """The phases as bands, and above them the steps."""
    bands = "".join(
        f'<i class="phase {_phase_class(span.phase)}" style="left:{100 * span.start / end:.3f}%;'
        f'width:{100 * (span.end - span.start) / end:.3f}%"></i>'
        for span in spans
    )
    steps = []
    for number in dict.fromkeys(span.step for span in spans):
        own = [span for span in spans if span.step == number]
        left, width = own[0].start / end, (own[-1].end - own[0].start) / end
        name = str(number) if number else "before"
        text = name if width > NARROW * 5 * len(name) else ""
        steps.append(f'<b style="left:{100 * left:.3f}%;width:{100 * width:.3f}%">{text}</b>')
    return f'<div class="bands">{bands}</div><div class="steps">{"".join(steps)}</div>'


def _legend(names: Iterable[str]) -> str:
    return f'<p class="legend">{"".join(f"<span class={name}>{name}</span>" for name in names)}</p>'


def _phase_legend(spans: Sequence[Span]) -> str:
    names = dict.fromkeys(span.phase for span in spans)
    return "".join(f'<span class="{_phase_class(name)}">{escape(name)}</span>' for name in names)


def _phase_class(phase: str) -> str:
    """A phase's class in the style."""
    return f"p-{escape(phase.replace(' ', '-'))}"


def _data(profile: Profile, end: float, top: float) -> str:
    """What the script tells, safe inside of a script element."""
    starts = [span.start for span in profile.spans]
    spans = [profile.spans[max(bisect_right(starts, seconds) - 1, 0)] for seconds in profile.seconds]
    words = [f"{span.phase} {f'of step {span.step}' if span.step else 'before step 1'}" for span in spans]
    kinds = {word: number for number, word in enumerate(dict.fromkeys(words))}
    data = {
        "end": end,
        "top": top,
        "seconds": profile.seconds,
        "bytes": dict(profile.bytes),
        "words": list(kinds),
        "word": [kinds[word] for word in words],
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")


# -- the peak ---------------------------------------------------------------------------------------------------------


def _bars(profile: Profile) -> str:
    rows = {"measured": profile.at_peak}
    if profile.predicted and profile.predicted_phase:
        rows["predicted"] = profile.predicted[profile.predicted_phase]
    most = max(sum(sizes.values()) for sizes in rows.values())
    bars = "".join(
        f'<p class="label">{name}: {bytes_text(sum(sizes.values()))}</p><div class="stack">{_stack(sizes, most)}</div>'
        for name, sizes in rows.items()
    )
    body = "".join(
        f'<tr><td><span class="dot {kind}"></span>{kind}</td>'
        + "".join(f"<td>{bytes_text(sizes.get(kind, 0))}</td>" for sizes in rows.values())
        + f"<td>{profile.at_peak.get(kind, 0) / profile.peak_bytes:.1%}</td></tr>"
        for kind in CATEGORIES
        if any(sizes.get(kind) for sizes in rows.values())
    )
    head = "".join(f"<th>{name}</th>" for name in (*rows, "share measured"))
    where = ""
    if profile.predicted_phase:
        where = f'<p class="note">The predicted peak falls in {escape(profile.predicted_phase)}, the measured one in \
{escape(profile.peak_phase)}.</p>'
    elif profile.not_predicted:
        where = f'<p class="note">No prediction: {escape(profile.not_predicted)}</p>'
    return f"""<div class="panel">{bars}</div>
<div class="scroll"><table><thead><tr><th>category</th>{head}</tr></thead><tbody>{body}</tbody></table></div>{where}"""


def _stack(sizes: Mapping[str, int], most: int) -> str:
    return "".join(
        f'<i class="{name}" title="{name}: {bytes_text(size)}" style="width:{100 * size / most:.2f}%"></i>'
        for name in CATEGORIES
        if (size := sizes.get(name))
    )


def _phases(profile: Profile) -> str:
    def cells(phases: Mapping[str, Mapping[str, int]] | None, phase: str) -> str:
        if phases is None:
            return ""
        return f"<td>{bytes_text(sum(phases[phase].values())) if phase in phases else '–'}</td>"

    body = "".join(
        f'<tr class="{"chosen" if phase == profile.peak_phase else ""}"><td>{escape(phase)}</td>'
        f"{cells(profile.phases, phase)}{cells(profile.predicted, phase)}<td>{_mostly(profile.phases[phase])}</td></tr>"
        for phase in profile.phases
    )
    predicted = "<th>predicted</th>" if profile.predicted is not None else ""
    return f"""<div class="scroll"><table><thead><tr><th>phase</th><th>measured</th>{predicted}<th>most of it</th></tr>
</thead><tbody>{body}</tbody></table></div>"""


def _mostly(sizes: Mapping[str, int]) -> str:
    """The largest categories, which make up most of a phase."""
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:2]
    total = sum(sizes.values())
    return ", ".join(f"{name} {size / total:.0%}" for name, size in largest)


def _tensors(profile: Profile) -> str:
    body = "".join(_tensor(tensor) for tensor in profile.tensors)
    names = ("size", "shape", "dtype", "category", "born in", "what, and the line that made it")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"""<div class="scroll"><table class="tensors"><thead><tr>{head}</tr></thead>
<tbody>{body}</tbody></table></div>
<p class="note">Tensors of the same line, shape and kind are one row. What a gradient, a weight or a moment belongs to
is its name; the line of a backward operation is that of the forward whose gradient it forms.</p>"""


def _tensor(tensor: Tensors) -> str:
    times = f"{tensor.count} × " if tensor.count > 1 else ""
    shape = " × ".join(f"{size:,}" for size in tensor.shape) if tensor.shape else "–"
    line = f"<br><code>{escape(tensor.line)}</code>" if tensor.line else ""
    return (
        f"<tr><td>{times}{bytes_text(tensor.bytes)}</td><td>{shape}</td><td>{escape(tensor.dtype or '–')}</td>"
        f'<td><span class="dot {tensor.category}"></span>{tensor.category}</td><td>{escape(tensor.phase)}</td>'
        f"<td>{escape(tensor.made) or 'a block'}{line}</td></tr>"
    )


def _advice(profile: Profile) -> str:
    largest = profile.largest_category
    note = ""
    if all(each.category != largest for each in profile.advice):
        share = profile.at_peak[largest] / profile.peak_bytes
        note = f"""<p class="note">No setting that is not on already lowers the largest category: {largest}, \
{share:.0%} of the peak.</p>"""
    if not profile.advice:
        return note
    return f'<ol class="todo">{"".join(_piece(each, profile) for each in profile.advice)}</ol>{note}'


def _piece(advice: Advice, profile: Profile) -> str:
    effect = ""
    if advice.peak_bytes is not None and profile.predicted_bytes:
        share = advice.peak_bytes / profile.predicted_bytes - 1
        effect = f'<span class="effect">predicted peak {bytes_text(advice.peak_bytes)} ({share:+.0%})</span>'
    exact = f"not exact: {escape(advice.changes)}" if advice.changes else "exact: the numbers stay the same"
    return (
        f'<li><div class="head"><b>{escape(advice.name)}</b><code>{escape(advice.text)}</code>{effect}</div>'
        f'<div><span class="dot {advice.category}"></span>saves {escape(advice.saves)}</div>'
        f'<div class="exact">{exact}</div></li>'
    )
