"use strict";
let data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const redraws = [];
const shown = new Map();

// --- small tools -------------------------------------------------------------------------------------

function add(parent, name, text, attributes = {}) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent.append(node);
  return node;
}
function draw(parent, name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function variable(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
const NUM_COLORS = 11; // as many as a tier has parts
function color(index) { return `var(--c${index % NUM_COLORS})`; }
function seconds(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const [unit, scale] = size >= 1 ? ["s", 1] : size >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return `${Number((value * scale).toPrecision(3))} ${unit}`;
}
function plain(value) { return String(Number(value.toPrecision(4))); }
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  while (value >= 999.5 && index < units.length - 1) { value /= 1024; index += 1; }
  return `${Number(value.toPrecision(3))} ${units[index]}`;
}
function niceStep(span, count) {
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999);
}
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const step = niceStep(high - low, count), found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}
function showTip(event, text) {
  const tip = $("tip");
  tip.textContent = text;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  let x = event.clientX + 14, y = event.clientY + 14;
  if (x + box.width > innerWidth - 6) x = Math.max(6, event.clientX - box.width - 14);
  if (y + box.height > innerHeight - 6) y = Math.max(6, event.clientY - box.height - 14);
  tip.style.left = `${x}px`;
  tip.style.top = `${y}px`;
}
function hideTip() { $("tip").style.display = "none"; }
addEventListener("pointerdown", hideTip, true);
addEventListener("scroll", hideTip, true);
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

// A drawing is a slider whose value is what one of its parts says: `index`, at (x, y) in it.
function tell(node, index, x, y, text) {
  const box = node.getBoundingClientRect();
  node.setAttribute("aria-valuenow", index);
  node.setAttribute("aria-valuetext", text);
  showTip({ clientX: box.left + x, clientY: box.top + y }, text);
}
// Lets the keys choose among count() parts of a drawing: show(index) tells of one.
function walk(node, count, show, hide = hideTip) {
  let index = -1;
  const attributes = { role: "slider", tabindex: 0, "aria-valuenow": 0, "aria-valuetext": "the arrow keys read it part by part" };
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.addEventListener("keydown", (event) => {
    const last = count() - 1;
    const to = { ArrowRight: index + 1, ArrowLeft: index - 1, PageUp: index + 10, PageDown: index - 10, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    index = Math.min(Math.max(to, 0), last);
    show(index);
  });
  node.addEventListener("blur", hide);
}
// Builds what is in #id when `value` is another than before: who reads or has the focus there is not disturbed.
function fill(id, value, build) {
  const text = JSON.stringify(value);
  if (shown.get(id) === text) return;
  shown.set(id, text);
  $(id).replaceChildren();
  build($(id), value);
}
function legend(parent, entries, className = "legend") {
  const box = add(parent, "div", undefined, { class: className });
  for (const [text, fill] of entries) {
    const item = add(box, "span");
    add(item, "i").style.background = fill;
    item.append(text);
  }
}
function missing(id, sentence) { add($(id), "p", sentence, { class: "quiet" }); }
function tiles(parent, facts) {
  for (const [name, value] of facts) {
    const tile = add(parent, "div", undefined, { class: "tile" });
    add(tile, "b", value, value.length > 16 ? { class: "long" } : {});
    add(tile, "span", name);
  }
}
function table(parent, header, rows) {
  const name = parent.closest("section").querySelector("h2").textContent;
  const box = parent.querySelector(".scroll") ?? add(parent, "div", undefined, { class: "scroll", tabindex: 0, role: "region", "aria-label": name });
  box.replaceChildren();
  const body = add(box, "table");
  const head = add(body, "tr");
  for (const cell of header) add(head, "th", cell, { scope: "col" });
  for (const [first, ...cells] of rows) {
    const row = add(body, "tr");
    add(row, "th", first, { scope: "row" });
    for (const cell of cells) add(row, "td", cell);
  }
}
function tipOn(node, text) {
  node.addEventListener("mousemove", (event) => showTip(event, text));
  node.addEventListener("mouseleave", hideTip);
}

// A tier's bytes as a bar; `scale` bytes are the whole width, and the limits are marks on it: [name, bytes, class].
function tierRow(parent, tier, parts, scale, { colors = parts.map((_, i) => color(i)), limits = [] } = {}) {
  const total = parts.reduce((sum, part) => sum + part.num_bytes, 0);
  const row = add(parent, "div", undefined, { class: "tier" });
  add(row, "b", tier);
  add(row, "span", bytes(total));
  const track = add(row, "div", undefined, { class: limits.length ? "track limited" : "track" });
  const bar = add(track, "div", undefined, { class: "bar" });
  bar.style.width = `${(100 * total) / scale}%`;
  parts.forEach((part, i) => {
    const piece = add(bar, "i");
    piece.style.width = `${(100 * part.num_bytes) / total}%`;
    piece.style.background = colors[i];
    tipOn(piece, `${tier}: ${part.what}\n${bytes(part.num_bytes)}`);
  });
  for (const [name, size, kind] of limits) {
    const mark = add(track, "u", undefined, { class: kind });
    mark.style.left = `${(100 * size) / scale}%`;
    if (kind === "short") {
      const lacking = add(track, "s");
      lacking.style.left = mark.style.left;
      lacking.style.width = `${(100 * (total - size)) / scale}%`;
    }
    tipOn(mark, `${tier}: ${name}\n${bytes(size)}`);
  }
  const under = add(row, "div", undefined, { class: "under" });
  legend(under, parts.map((part, i) => [`${part.what} ${bytes(part.num_bytes)}`, colors[i]]));
  return under;
}

const LANE_COLORS = { h2d: 2, d2h: 1, update: 3, "device update": 3, landing: 5, "nvme read": 4, "nvme write": 6 };

function redrawAll() { for (const redraw of redraws) redraw(); }
function keepDrawn() {
  let pending = 0;
  addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(redrawAll); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
}
