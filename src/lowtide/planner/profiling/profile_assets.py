"""The style of a profile's page, and the script that tells what its timeline holds under the pointer."""

STYLE = """
:root { --weights: #4c78a8; --gradients: #5ba8a0; --optimizer: #8f7bb5; --reference: #a0785a; --activations: #e0893c;
  --head: #cf5b6b; --other: #a3a39d; --quiet: #e9e7e2; }
@media (prefers-color-scheme: dark) { :root { --weights: #6f9fd1; --gradients: #74c2b9; --optimizer: #ab98d1;
  --reference: #bd957a; --activations: #f0a562; --head: #e5808e; --other: #85857f; --quiet: #2a2f35; } }
h2 + .panel, .panel { padding: .25rem 1.25rem 1.25rem; background: var(--panel); border: 1px solid var(--line);
  border-radius: 4px; margin-bottom: .75rem; }
.panel .label { margin-top: 1rem; font-size: .9rem; color: var(--dim); }
.stack { display: flex; height: 1.6rem; margin-top: .25rem; border-radius: 3px; overflow: hidden; }
.stack i, .dot { background: var(--its); }
.dot { display: inline-block; width: .7rem; height: .7rem; margin-right: .45rem; border-radius: 2px; }
.legend span::before { border-top: .7rem solid var(--its); border-radius: 2px; width: .7rem; }
.legend.phases { margin: .5rem 0 0; color: var(--dim); }
#timeline { grid-template: 18rem 2.4rem 1.4rem / 4.2rem 1fr; touch-action: pan-y; }
#timeline path { fill: var(--its); } #timeline svg { overflow: hidden; }
#timeline .frame { cursor: crosshair; }
.best { top: 0; bottom: 0; border-left: 1.5px dashed var(--ink); opacity: .75; pointer-events: none; }
.best b { position: absolute; top: 0; padding: 0 .4rem; white-space: nowrap; background: var(--panel);
  font-style: normal; font-size: .85rem; border-radius: 3px; }
.best.left b { right: .3rem; } .best.right b { left: .3rem; }
.cursor { top: 0; bottom: 0; border-left: 1px solid var(--ink); pointer-events: none; }
.tip { position: absolute; top: .4rem; z-index: 1; padding: .5rem .7rem; width: 13.5rem; font-size: .82rem;
  line-height: 1.4; background: var(--panel); border: 1px solid var(--line); border-radius: 4px;
  box-shadow: 0 2px 8px #0003; pointer-events: none; font-variant-numeric: tabular-nums; }
.tip div { display: flex; justify-content: space-between; gap: 1rem; } .tip .head { font-weight: 600; display: block; }
.strip { grid-column: 2; position: relative; margin-top: .3rem; }
.bands, .steps { position: relative; height: .7rem; overflow: hidden; } .steps { height: 1.2rem; }
.bands { border-radius: 2px; background: var(--quiet); }
.bands i, .steps b { position: absolute; top: 0; bottom: 0; }
.steps b { border-left: 1px solid var(--dim); padding-left: .25rem; font: 500 .75rem/1.2rem system-ui;
  color: var(--dim); overflow: hidden; }
.p-forward { --its: #7fb2d9; } .p-head { --its: var(--head); } .p-backward { --its: #d9b36a; }
.p-optimizer { --its: #9b86c4; } .p-evaluation { --its: #78b890; } .p-saving { --its: #b88f78; }
.p-data-and-logging { --its: var(--other); } .p-rehearsal { --its: #c4a5bd; } .bands i { background: var(--its); }
#timeline .down { grid-column: 2; } .down span { white-space: nowrap; } 
.down span:first-child { transform: none; } .down span:last-child { transform: translateX(-100%); }
.todo { margin: 0; padding: 0; list-style: none; counter-reset: todo; display: grid; gap: .6rem; }
.todo li { padding: .7rem 1rem; background: var(--panel); border: 1px solid var(--line); border-radius: 4px;
  overflow-wrap: anywhere; }
.todo .head { display: flex; flex-wrap: wrap; gap: .1rem .6rem; align-items: baseline; }
.todo code { padding: .05rem .35rem; background: var(--quiet); border-radius: 3px;
  font-size: .88rem; }
.effect { margin-left: auto; color: var(--best); font-weight: 600; } .exact { color: var(--dim); font-size: .9rem; }
.tensors td { vertical-align: top; } .tensors td:nth-child(n+4), .tensors th:nth-child(n+4) { text-align: left; }
.tensors td:last-child { white-space: normal; min-width: 18rem; overflow-wrap: anywhere; }
td code { font-size: .84rem; color: var(--dim); }
.chosen td, .chosen td:first-child { background: var(--tint); font-weight: 600; }
@media (max-width: 40rem) { #timeline { grid-template-rows: 14rem 2.4rem 1.4rem; padding-right: .75rem; }
  .effect { margin-left: 0; } }
"""
SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const frame = document.querySelector("#timeline .frame");
const cursor = frame.querySelector(".cursor"), tip = frame.querySelector(".tip");
const text = (bytes) => {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (bytes < 1024) return bytes.toFixed(unit === "B" ? 0 : 1) + " " + unit;
    bytes /= 1024;
  }
  return bytes.toFixed(2) + " GiB";
};
const line = (left, right, name) => {
  const [row, label, value, dot] = ["div", "span", "span", "span"].map((kind) => document.createElement(kind));
  if (name) { dot.className = "dot " + name; label.append(dot); }
  label.append(left); value.append(right); row.append(label, value);
  return row;
};
const show = (event) => {
  const box = frame.getBoundingClientRect();
  const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1), seconds = share * data.end;
  let low = 0, high = data.seconds.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (data.seconds[middle] <= seconds) low = middle; else high = middle - 1;
  }
  const head = document.createElement("div");
  head.className = "head"; head.append(data.words[data.word[low]]);
  const names = Object.keys(data.bytes).filter((name) => data.bytes[name][low] > 0);
  const total = names.reduce((sum, name) => sum + data.bytes[name][low], 0);
  tip.replaceChildren(head, line(seconds.toPrecision(3) + " s", text(total)),
    ...names.reverse().map((name) => line(name, text(data.bytes[name][low]), name)));
  cursor.hidden = tip.hidden = false;
  cursor.style.left = 100 * share + "%";
  const left = Math.min(Math.max(share * box.width + (share > 0.5 ? -tip.offsetWidth - 12 : 12), 0),
    box.width - tip.offsetWidth);
  tip.style.left = left + "px";
};
frame.addEventListener("pointermove", show);
frame.addEventListener("pointerdown", show);
frame.addEventListener("pointerleave", () => { cursor.hidden = tip.hidden = true; });
"""
