const grid = JSON.parse(document.getElementById("grid").textContent), at = id => document.getElementById(id);
const MIB = 1048576, MOST = 1024, gib = size => (size / 1024 / MIB).toFixed(2) + " GiB";
const count = number => Math.round(number).toLocaleString("en-US");

/* Bytes at some tokens of a micro-batch: the fullest phase, each a line between two traced sizes. */
function peak(lines, tokens, method) {
  const [start, end] = grid.tokens[method], share = Math.max(0, (tokens - start) / (end - start));
  return Math.max(...lines.map(([low, high]) => low + share * (high - low))) * MIB;
}
function mostTokens(lines, room, limit, method) {
  let low = 0, high = limit;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (peak(lines, middle, method) <= room) low = middle; else high = middle - 1;
  }
  return low;
}
/* Tokens a second of a batch in micro-batches of so many tokens: lines between timed sizes; attention takes longer in
   longer rows. */
function speedOf(timed, tokens, batch, sequence, method) {
  const sizes = grid.timed[method], last = sizes.length - 1, attention = timed[last + 1], once = timed[last + 2];
  let k = 1;
  while (k < last && tokens > sizes[k]) k += 1;
  const share = Math.max(0, (tokens - sizes[k - 1]) / (sizes[k] - sizes[k - 1]));
  const alone = timed[k - 1] + share * (timed[k] - timed[k - 1])
    + attention * tokens / sizes[last] * (sequence / grid.row - 1);
  return 1000 * batch / (alone * batch / tokens + once);
}
/* Tokens of a row, and of its longest sequence: of a pair each part, its prompt too, has half of the length. */
function sizesOf(asked) {
  const parts = grid.parts[asked.method], half = Math.max(1, Math.floor(asked.length / 2));
  return parts === 1 ? [asked.length, asked.length] : [parts * half, 2 * half];
}
/* What fits of one way on one device, with its fastest settings. Rows are not cut. */
function fit(way, device, asked) {
  const room = Math.floor(device.memory / (1 + grid.band)) - device.context, [row, sequence] = sizesOf(asked);
  const batch = row * asked.rows, positions = Math.max(row, Math.floor(asked.positions * row / sequence));
  let best = null, longest = 0, least = {bytes: Infinity};
  for (const stage of way.stages) {
    const lines = grid.peaks[asked.shape][asked.method][stage.key];
    const timed = grid.seconds[asked.shape][asked.method][stage.key];
    const smallest = stage.whole ? batch : row, most = mostTokens(lines, room, batch, asked.method);
    const held = peak(lines, smallest, asked.method) + device.context;
    if (held < least.bytes) {
      const alone = smallest < batch ? "--tokens_per_microbatch " + smallest : "";
      least = {bytes: held, speed: null, settings: way.written + stage.written + alone};
    }
    const rows = stage.whole ? asked.rows : 1;
    if (stage.long) {
      const those = Math.floor(mostTokens(lines, room, positions * rows, asked.method) / rows);
      longest = Math.max(longest, Math.min(positions, those));
    }
    if (!timed || peak(lines, smallest, asked.method) > room) continue;
    const cut = Math.max(Math.floor(most / smallest), 1) * smallest, tokens = Math.min(cut, batch);
    const speed = speedOf(timed[device.number], tokens, batch, sequence, asked.method);
    if (best && best.speed >= speed) continue;
    best = {bytes: peak(lines, cut, asked.method) + device.context, speed, settings: way.written + stage.written
      + (cut < batch ? "--tokens_per_microbatch " + cut : "")};
  }
  const said = best || least, fits = said.bytes <= room + device.context;
  return {fits, bytes: said.bytes, longest, speed: said.speed, settings: fits ? said.settings : null};
}
function row(cells, name) {
  const line = document.createElement("tr");
  if (name) line.className = name;
  for (const text of cells) {
    const cell = document.createElement(name === "head" ? "th" : "td");
    cell.textContent = text;
    if (name === "head") cell.scope = "col";
    line.append(cell);
  }
  return line;
}
/* As it is typed; a line is broken between options alone. Longer rows than MOST, the default, would be cut. */
function command(settings, length) {
  const code = document.createElement("code"), method = at("method").value;
  let words = "lowtide " + method + " --model " + at("model").value + " --dataset DATA --per_device_train_batch_size "
    + at("rows").value + " ";
  if (length > MOST) words += "--max_length " + length + " ";
  words += settings;
  for (const word of words.trim().split(/\s+(?=--)/)) {
    const part = document.createElement("span");
    part.textContent = word;
    code.append(part, " ");
  }
  return code;
}
/* A button that copies a text, and says whether it could: where there is no clipboard, the text is marked instead. */
function copying(name, of, text, marked) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
  button.setAttribute("aria-label", name + " " + of);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      if (marked) getSelection().selectAllChildren(marked);
      button.textContent = marked ? "Marked" : "Copy the address instead";
    }
    setTimeout(() => { button.textContent = name; }, 2000);
  });
  return button;
}
/* The choices stand in the address behind #, so that a link to it is a link to the answer. */
const CHOICES = ["model", "method", "device", "length", "rows"];
const tokensAt = step => String(Math.round(2 ** step));
function choose() {
  const said = new URLSearchParams(location.hash.slice(1));
  for (const id of CHOICES.filter(each => said.has(each))) {
    const control = at(id), value = said.get(id);
    if (id === "length") {
      for (let step = Number(control.min); step <= Number(control.max); step += Number(control.step))
        if (tokensAt(step) === value) control.value = step;
    } else if (control.options ? [...control.options].some(each => each.value === value) : /^[0-9]+$/.test(value)) {
      control.value = value;
    }
  }
  update();
}
function keepChoices() {
  const said = new URLSearchParams(CHOICES.map(id => [id, id === "length" ? tokensAt(at(id).value) : at(id).value]));
  history.replaceState(null, "", "#" + said);
}
function shown(way, found, device, length) {
  const box = document.createElement("div"), title = document.createElement("h3");
  box.className = "way " + (found.fits ? "yes" : "no");
  box.setAttribute("role", "listitem");
  const said = document.createElement("span"), bar = document.createElement("div"), part = document.createElement("i");
  title.textContent = way.name + " ";
  said.textContent = (found.fits ? "fits: " : "does not fit: ") + gib(found.bytes) + " of " + gib(device.memory)
    + (found.fits ? "" : ", of which 5% are left free");
  title.append(said);
  bar.className = "bar"; bar.append(part);
  part.style.width = Math.min(100, 100 * found.bytes / device.memory) + "%";
  const more = document.createElement("p");
  more.textContent = (found.longest ? "Longest row " + count(found.longest) + " tokens. " : "No row fits. ")
    + (found.speed ? "Some " + count(found.speed) + " tokens/s. " : "");
  box.append(title, bar, more);
  if (found.settings) {
    const typed = command(found.settings, length);
    box.append(typed, copying("Copy", "the command of " + way.name, () => typed.textContent.trim(), typed));
  }
  if (way.changes) {
    const note = document.createElement("p");
    note.textContent = way.changes[0].toUpperCase() + way.changes.slice(1) + ".";
    box.append(note);
  }
  return box;
}
function update() {
  const device = grid.devices.find(each => each.name === at("device").value), name = at("model").value;
  const shape = grid.models[name], positions = grid.positions[name];
  const length = Math.min(Math.round(2 ** Number(at("length").value)), positions), rows = Number(at("rows").value);
  const asked = {method: at("method").value, shape, positions, length, rows};
  at("length_said").textContent = count(length); at("rows_said").textContent = rows;
  at("length").setAttribute("aria-valuetext", count(length) + " tokens");
  const found = grid.ways.map(way => fit(way, device, asked)), first = found.findIndex(each => each.fits);
  at("best_label").textContent = name + " on " + device.name;
  at("best").textContent = first < 0 ? "does not fit" : grid.ways[first].name + " fits";
  const other = grid.devices.find(each => grid.ways.some(way => fit(way, each, asked).fits));
  at("best_more").textContent = first >= 0 ? gib(found[first].bytes) + " of " + gib(device.memory) + ", rows of up to "
    + count(found[first].longest) + " tokens" : other ? "The smallest device that works is " + other.name
    : "No single device of the table holds it.";
  at("ways_title").textContent = "Ways to train it on " + device.name;
  at("ways").replaceChildren(...grid.ways.map((way, k) => shown(way, found[k], device, length)));
  const head = row(["device", "memory", ...grid.ways.map(way => way.name)], "head");
  let marked = false;
  const body = grid.devices.map(each => {
    const fits = grid.ways.map(way => fit(way, each, asked)), any = fits.some(one => one.fits), mark = any && !marked;
    marked = marked || any;
    return row([each.name + (mark ? " (smallest)" : ""), gib(each.memory),
      ...fits.map(one => one.fits ? gib(one.bytes) : "no")], mark ? "first" : "");
  });
  at("devices").replaceChildren(head, ...body);
}
for (const id of CHOICES) at(id).addEventListener("input", () => { update(); keepChoices(); });
addEventListener("hashchange", choose);
at("best_more").after(copying("Copy link", "to this answer", () => { keepChoices(); return location.href; }));
choose();
