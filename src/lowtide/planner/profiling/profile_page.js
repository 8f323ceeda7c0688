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
