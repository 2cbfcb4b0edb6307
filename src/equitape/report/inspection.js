"use strict";
// The script of the inspect page: unpacks the data, draws maps, strips and lines, follows sliders and pointer.

const data = JSON.parse(document.getElementById("data").textContent);
const MISSING = 255, LEVELS = 254;
const layerSlider = document.getElementById("layer"), headSlider = document.getElementById("head");
const sharedBox = document.getElementById("shared"), tip = document.getElementById("tip");

function bytesOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

async function unpack(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const colours = Object.fromEntries(Object.entries(data.colours).map(([name, text]) => [name, bytesOf(text)]));

function valueOf(scale, level) {
  if (level === MISSING) return NaN;
  const share = level / LEVELS;
  if (scale.kind === "linear") return scale.low + share * (scale.high - scale.low);
  if (scale.kind === "root") return share * share * scale.high;
  const side = 2 * share - 1;
  return Math.sign(side) * side * side * scale.high;
}

function levelOf(scale, value) {
  const high = Math.max(scale.high, 1e-30);
  let share = (value - scale.low) / Math.max(scale.high - scale.low, 1e-30);
  if (scale.kind === "root") share = Math.sqrt(Math.max(value, 0) / high);
  if (scale.kind === "signed") share = 0.5 + 0.5 * Math.sign(value) * Math.sqrt(Math.abs(value) / high);
  return Math.min(Math.max(Math.round(share * LEVELS), 0), LEVELS);
}

// the colours of a layer's levels on the scale shared by all layers
function sharedTable(entry, layer) {
  const table = new Uint8Array(3 * (LEVELS + 1)), all = colours[entry.colours];
  for (let level = 0; level <= LEVELS; level++) {
    const place = levelOf(entry.shared, valueOf(entry.scales[layer], level));
    table.set(all.subarray(3 * place, 3 * place + 3), 3 * level);
  }
  return table;
}

function show(value) {
  if (Number.isNaN(value)) return "no value";
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(3)));
}

function quoted(first, last) {
  const words = data.labels.slice(first, last + 1).join("");
  const shown = words.length > 40 ? words.slice(0, 40) + "…" : words;
  return (first === last ? `${first}` : `${first}–${last}`) + ` “${shown}”`;
}

// a kv head serves several query heads; slice 0 is their mean if there are several
function sliceOf(entry) {
  const head = Number(headSlider.value);
  if (entry.slices === 1 || head === 0) return 0;
  if (entry.by === "group") return 1 + Math.floor(((head - 1) * data.groups) / data.heads);
  return head;
}

function paint(canvas, levels, columns, rows, table) {
  const image = new ImageData(columns, rows);
  for (let index = 0; index < columns * rows; index++) {
    const level = levels[index];
    if (level === MISSING) continue;
    image.data.set(table.subarray(3 * level, 3 * level + 3), 4 * index);
    image.data[4 * index + 3] = 255;
  }
  canvas.width = columns;
  canvas.height = rows;
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function label(ends, scale) {
  ends.forEach((end, index) => { end.textContent = show(valueOf(scale, (index * LEVELS) / 2)); });
}

function colourBar(entry, parent) {
  const bar = document.createElement("div");
  bar.className = "bar";
  const ramp = document.createElement("canvas");
  paint(ramp, Uint8Array.from({ length: LEVELS + 1 }, (_, index) => index), LEVELS + 1, 1, colours[entry.colours]);
  const ends = [0, 1, 2].map(() => document.createElement("span"));
  label(ends, entry.scale ?? entry.scales[0]);
  const labels = document.createElement("div");
  labels.append(...ends);
  bar.append(ramp, labels);
  parent.append(bar);
  return ends;
}

function make(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// at most `most` evenly spaced indices, the first and the last among them
function spaced(count, most) {
  const number = Math.min(count, most);
  return Array.from({ length: number }, (_, index) => Math.round((index * (count - 1)) / Math.max(1, number - 1)));
}

function ticks(className, count, most, name, side) {
  const axis = make("div", `ticks ${className}`);
  for (const index of spaced(count, most)) {
    const tick = make("span", "", name(index));
    tick.style[side] = `${(100 * (index + 0.5)) / count}%`;
    axis.append(tick);
  }
  return axis;
}

function tickOf(first) {
  return `${first} ${data.labels[first].trim().slice(0, 8)}`;
}

// axes: { rows, columns: [count, name of an index, title] }
function frame(entry, parent, axes) {
  const figure = document.createElement("figure");
  const heading = make("h3", "", entry.title);
  if (entry.slices > 1) heading.append(make("span", "moves", " ◆"));
  const box = document.createElement("div");
  box.className = "box";
  const canvas = document.createElement("canvas");
  canvas.id = "map-" + entry.name;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${entry.title}. ${entry.caption}`);
  const cross = document.createElement("div");
  cross.className = "cross";
  box.append(canvas, cross);
  const caption = make("figcaption", "", `${entry.caption} `);
  caption.append(make("span", "follows", entry.follows));
  const [numRows, rowName, rowTitle] = axes.rows, [numColumns, columnName, columnTitle] = axes.columns;
  const plot = make("div", "plot");
  plot.append(
    make("div", "down", rowTitle), ticks("rows", numRows, 9, rowName, "top"), box,
    ticks("columns", numColumns, 7, columnName, "left"), make("div", "across", columnTitle),
  );
  figure.append(heading, plot);
  const ends = colourBar(entry, figure);
  figure.append(caption);
  parent.append(figure);
  return { entry, canvas, cross, ends };
}

function placeTip(event, lines) {
  tip.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
  tip.hidden = false;
  const gap = 14, width = tip.offsetWidth, height = tip.offsetHeight;
  const left = event.clientX + gap + width > innerWidth ? event.clientX - gap - width : event.clientX + gap;
  const top = event.clientY + gap + height > innerHeight ? event.clientY - gap - height : event.clientY + gap;
  tip.style.left = `${Math.max(0, left)}px`;
  tip.style.top = `${Math.max(0, top)}px`;
}

// mark the tokens of a query and a key in the text
function markText(query, key) {
  for (const marked of document.querySelectorAll("#text .query, #text .key")) marked.classList.remove("query", "key");
  for (const [name, range] of [["query", query], ["key", key]]) {
    if (!range) continue;
    for (let index = range[0]; index <= range[1]; index++) {
      document.querySelector(`#text [data-token="${index}"]`)?.classList.add(name);
    }
  }
}

function follow(view, columns, rows, tell, pick, mark) {
  const cellOf = (event) => {
    const bounds = view.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - bounds.left) / bounds.width) * columns());
    const row = Math.floor(((event.clientY - bounds.top) / bounds.height) * rows());
    return [Math.min(Math.max(row, 0), rows() - 1), Math.min(Math.max(column, 0), columns() - 1)];
  };
  view.canvas.addEventListener("pointermove", (event) => {
    const [row, column] = cellOf(event);
    placeTip(event, tell(row, column));
    if (mark) markText(...mark(row, column));
    Object.assign(view.cross.style, {
      display: "block",
      left: `${(100 * column) / columns()}%`, width: `${100 / columns()}%`,
      top: `${(100 * row) / rows()}%`, height: `${100 / rows()}%`,
    });
  });
  view.canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
    markText();
    view.cross.style.display = "none";
  });
  if (pick) view.canvas.addEventListener("click", (event) => pick(...cellOf(event)));
}

// --- maps: one layer at a time is unpacked -------------------------------------------------------------------------
const maps = data.maps.map((entry) => {
  const byHead = entry.cells === "heads";
  const name = (index) => (byHead ? `kv head ${index + 1}` : quoted(...data[entry.cells][index]));
  const tick = (index) => (byHead ? `${index + 1}` : tickOf(data[entry.cells][index][0]));
  const [above, across] = byHead ? ["to", "from"] : ["query", "key"];
  const titles = byHead ? ["to kv head", "from kv head"] : ["query (token)", "key (token)"];
  const view = frame(entry, document.getElementById("maps"), {
    rows: [entry.side, tick, titles[0]], columns: [entry.side, tick, titles[1]],
  });
  view.levels = new Uint8Array(entry.side * entry.side).fill(MISSING);
  follow(view, () => entry.side, () => entry.side, (row, column) => [
    `${above} ${name(row)}`,
    `${across} ${name(column)}`,
    `${entry.title}: ${show(valueOf(entry.scales[view.layer ?? 0], view.levels[row * entry.side + column]))}`,
  ], undefined, byHead ? undefined : (row, column) => [data[entry.cells][row], data[entry.cells][column]]);
  return view;
});

let turn = 0;
async function drawMaps() {
  const mine = ++turn, layer = Number(layerSlider.value) - 1;
  for (const view of maps) {
    const { entry } = view;
    if (view.layer !== layer) {
      const unpacked = await unpack(entry.data[layer]);
      // the slider has moved meanwhile
      if (mine !== turn) return;
      view.all = unpacked;
      view.layer = layer;
    }
    label(view.ends, sharedBox.checked ? entry.shared : entry.scales[layer]);
    const table = sharedBox.checked ? sharedTable(entry, layer) : colours[entry.colours];
    const size = entry.side * entry.side, start = sliceOf(entry) * size;
    view.levels = view.all.subarray(start, start + size);
    paint(view.canvas, view.levels, entry.side, entry.side, table);
  }
  document.body.dataset.scale = sharedBox.checked ? "shared" : "layer";
  document.body.dataset.drawn = `${layer + 1}/${headSlider.value}`;
}

// --- strips: all layers by all tokens ------------------------------------------------------------------------------
const strips = data.strips.map((entry) => {
  const view = frame(entry, document.getElementById("strips"), {
    rows: [data.layers, (index) => `${index + 1}`, "layer"],
    columns: [entry.columns, (index) => tickOf(data.cells[index][0]), "token"],
  });
  view.canvas.classList.add("strip");
  view.canvas.style.height = `${Math.min(Math.max(11, 0.55 * data.layers), 24)}rem`;
  const mark = document.createElement("div");
  mark.className = "mark";
  view.cross.after(mark);
  view.mark = mark;
  follow(
    view, () => entry.columns, () => data.layers,
    (row, column) => [
      `token ${quoted(...data.cells[column])}`,
      `layer ${row + 1}`,
      `${entry.title}: ${view.levels ? show(valueOf(entry.scale, view.levels[row * entry.columns + column])) : ""}`,
    ],
    (row) => { layerSlider.value = row + 1; update(); },
    (row, column) => [undefined, data.cells[column]],
  );
  view.ready = unpack(entry.data).then((all) => { view.all = all; });
  return view;
});

async function drawStrips() {
  for (const view of strips) {
    await view.ready;
    const { entry } = view, slice = sliceOf(entry);
    view.levels = new Uint8Array(data.layers * entry.columns);
    for (let layer = 0; layer < data.layers; layer++) {
      const start = (layer * entry.slices + slice) * entry.columns;
      view.levels.set(view.all.subarray(start, start + entry.columns), layer * entry.columns);
    }
    paint(view.canvas, view.levels, entry.columns, data.layers, colours[entry.colours]);
    const height = 100 / data.layers;
    Object.assign(view.mark.style, { top: `${height * (Number(layerSlider.value) - 1)}%`, height: `${height}%` });
  }
}

// --- lines: one number per layer -----------------------------------------------------------------------------------
const SVG = "http://www.w3.org/2000/svg";
function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const lines = data.lines.map((entry) => {
  const width = 300, height = 130, left = 46, right = 10, top = 22, bottom = 22;
  const known = entry.values.filter((value) => value !== null);
  const low = Math.min(0, ...known), high = Math.max(...known, low + 1e-12);
  const x = (index) => left + ((width - left - right) * index) / Math.max(1, data.layers - 1);
  const y = (value) => height - bottom - ((height - top - bottom) * (value - low)) / (high - low);
  const picture = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  picture.append(
    element("title", {}, `${entry.title} by layer: ${entry.values.map((v) => (v === null ? "none" : v)).join(", ")}`),
    element("text", { x: 4, y: 13, class: "name" }, entry.title),
    element("line", { x1: left, x2: width - right, y1: y(low), y2: y(low), class: "axis" }),
    element("text", { x: left - 5, y: y(low) + 4, class: "tick", "text-anchor": "end" }, show(low)),
    element("text", { x: left - 5, y: y(high) + 4, class: "tick", "text-anchor": "end" }, show(high)),
    element("text", { x: x(0), y: height - 6, class: "tick" }, "layer 1"),
    element("text", { x: width - right, y: height - 6, class: "tick", "text-anchor": "end" }, String(data.layers)),
  );
  const points = entry.values.map((value, index) => (value === null ? null : [x(index), y(value)])).filter(Boolean);
  picture.append(element("polyline", { points: points.map((point) => point.join(",")).join(" "), class: "line" }));
  const dot = element("circle", { r: 4, class: "dot" }), reading = element("text", { class: "reading" });
  picture.append(dot, reading);
  document.getElementById("lines").append(picture);
  return { entry, dot, reading, x, y, width };
});

function drawLines() {
  const index = Number(layerSlider.value) - 1;
  for (const { entry, dot, reading, x, y, width } of lines) {
    const value = entry.values[index];
    const hidden = value === null ? "none" : "";
    dot.style.display = reading.style.display = hidden;
    if (value === null) continue;
    dot.setAttribute("cx", x(index));
    dot.setAttribute("cy", y(value));
    const late = x(index) > width * 0.7;
    reading.setAttribute("x", x(index) + (late ? -8 : 8));
    reading.setAttribute("y", y(value) < 40 ? y(value) + 14 : y(value) - 7);
    reading.setAttribute("text-anchor", late ? "end" : "start");
    reading.textContent = show(value);
  }
}

// --- tokens with most mixing ----------------------------------------------------------------------------------------
function drawTokens() {
  if (!data.mixers.length) return;
  const strongest = data.mixers[Number(layerSlider.value) - 1];
  const named = strongest.map(([index, strength]) => `${quoted(index, index)} ${show(strength)}`);
  document.getElementById("tokens").textContent =
    named.length ? `Tokens that mix most in this layer: ${named.join(", ")}` : "Nothing is mixed in this layer.";
}

async function update() {
  const head = Number(headSlider.value);
  document.getElementById("layer-out").textContent = `${layerSlider.value} of ${data.layers}`;
  const served = data.groups > 1 && head ? `, kv head ${1 + Math.floor(((head - 1) * data.groups) / data.heads)}` : "";
  document.getElementById("head-out").textContent = head ? `${head} of ${data.heads}${served}` : "mean of all";
  drawLines();
  await drawMaps();
  await drawStrips();
  drawTokens();
}

layerSlider.max = data.layers;
// states differ most near the end; the last layer updates nothing
layerSlider.value = Math.max(1, data.layers - 1);
headSlider.max = data.heads > 1 ? data.heads : 0;
layerSlider.addEventListener("input", update);
headSlider.addEventListener("input", update);
sharedBox.addEventListener("input", update);
if (typeof DecompressionStream === "undefined") {
  document.getElementById("trouble").textContent = "This browser cannot unpack the data (no DecompressionStream); use a newer browser.";
} else {
  update();
}
