// SPDX-License-Identifier: Apache-2.0
// Elements, units, ticks, colours: what every picture uses and that knows of none of them.

const $ = (id) => document.getElementById(id);

// An element; strings become text and never markup, so that a path in a trace stays a path.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

// ---- units -----------------------------------------------------------------------------------

// What is not known is n/a, and never 0.
const isKnown = (value) => typeof value === "number" && Number.isFinite(value);

function digits3(value) {
  if (!isKnown(value)) return "n/a";
  const size = Math.abs(value);
  const text = value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function bytesText(bytes) {
  if (!isKnown(bytes)) return "n/a";
  let power = 0;
  let value = bytes;
  while (Math.abs(value) >= 1023.5 && power < BYTE_UNITS.length - 1) {
    value /= 1024;
    power += 1;
  }
  return `${digits3(value)} ${BYTE_UNITS[power]}`;
}

function rateText(bytesPerSecond) {
  if (!isKnown(bytesPerSecond)) return "n/a";
  const units = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];
  let power = 0;
  let value = bytesPerSecond;
  while (value >= 999.5 && power < units.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${digits3(value)} ${units[power]}`;
}

function secondsText(seconds) {
  if (!isKnown(seconds)) return "n/a";
  const size = Math.abs(seconds);
  if (size < 1e-6) return `${digits3(seconds * 1e9)} ns`;
  if (size < 1e-3) return `${digits3(seconds * 1e6)} µs`;
  if (size < 0.9995) return `${digits3(seconds * 1e3)} ms`;
  if (size < 99.95) return `${digits3(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

const countText = (n) => (!isKnown(n) ? "n/a" : Math.round(n).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f"));
const percentText = (share) => (isKnown(share) ? `${digits3(share * 100)} %` : "n/a");
const plural = (n, noun) => `${countText(n)} ${noun}${n === 1 ? "" : "s"}`;

// ---- ticks -----------------------------------------------------------------------------------

function stepFor(span, most, bases, factor) {
  let scale = factor ** Math.floor(Math.log(span / most) / Math.log(factor));
  for (;;) {
    for (const base of bases) if (base * scale * most >= span) return base * scale;
    scale *= factor;
  }
}

function steps(low, high, step, label) {
  const found = [];
  const first = Math.ceil(low / step - 1e-9);
  for (let i = first; i * step <= high * (1 + 1e-12) + step * 1e-9; i += 1) {
    found.push({ at: i * step, label: label(i * step) });
  }
  return found;
}

// Ticks of a time axis and what they are in. Zoomed far in, the labels are differences to `from`:
// twelve digits that are all the same but for the last two say nothing.
function timeTicks(t0, t1, most) {
  const span = t1 - t0;
  if (span >= 180) {
    const step = [30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400]
      .find((s) => s * most >= span) ?? 86400 * Math.ceil(span / most / 86400);
    const two = (n) => String(Math.floor(n)).padStart(2, "0");
    const label = (s) => (t1 >= 3600
      ? `${Math.floor(s / 3600)}:${two((s % 3600) / 60)}${step % 60 ? `:${two(s % 60)}` : ""}`
      : `${Math.floor(s / 60)}:${two(s % 60)}`);
    return { ticks: steps(t0, t1, step, label), unit: t1 >= 3600 ? "h:min" : "min:s", from: 0 };
  }
  const step = stepFor(span, most, [1, 2, 5], 10);
  const [scale, unit] = span >= 0.5 ? [1, "s"] : span >= 5e-4 ? [1e3, "ms"] : [1e6, "µs"];
  const places = Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9));
  const far = t1 * scale >= 1e5;
  const from = far ? Math.floor(t0 / (step * 10)) * step * 10 : 0;
  const ticks = steps(t0 - from, t1 - from, step, (s) => (s * scale).toFixed(places));
  for (const tick of ticks) tick.at += from;
  return { ticks, unit, from };
}

// Ticks of an offset axis and what they are in; far from zero and zoomed in, as differences to
// `from`, a round place.
function byteTicks(o0, o1, most) {
  const span = o1 - o0;
  const step = Math.max(1, stepFor(span, most, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512], 1024));
  let power = 0;
  while (1024 ** (power + 1) <= step && power < BYTE_UNITS.length - 1) power += 1;
  // The larger unit where that needs no more than two decimals: 1.25 GiB and not 1280 MiB.
  if (o1 / 1024 ** power > 4096 && step / 1024 ** (power + 1) >= 0.125) power += 1;
  const scale = 1024 ** power;
  const from = o1 / scale >= 32768 ? Math.floor(o0 / (1024 * scale)) * 1024 * scale : 0;
  const places = step % scale === 0 ? 0 : Math.min(3, Math.ceil(Math.log2(scale / step) / 2) + 1);
  const ticks = steps(o0 - from, o1 - from, step, (o) => (o / scale).toFixed(places));
  for (const tick of ticks) tick.at += from;
  return { ticks, unit: BYTE_UNITS[power], from };
}

// A size that loses nothing: 47616 MiB and not 46.5 GiB.
function exactBytesText(bytes) {
  let power = 0;
  while (power < BYTE_UNITS.length - 1 && bytes && bytes % 1024 ** (power + 1) === 0) power += 1;
  return `${countText(bytes / 1024 ** power)} ${BYTE_UNITS[power]}`;
}

function plainTicks(low, high, most, label) {
  return steps(low, high, stepFor(high - low || 1, most, [1, 2, 5], 10), label);
}

// ---- colours ---------------------------------------------------------------------------------

// The style sheet is where colours live; a picture asks for them when it draws.
function theme() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    back: get("plot"), text: get("text"), muted: get("muted"), line: get("line"),
    frame: get("frame"), accent: get("accent"), band: get("band"),
    ranks: [0, 1, 2, 3, 4, 5, 6].map((i) => get(`rank-${i}`)),
    major: get("miss"), missed: get("miss"), late: get("late"),
    warm: get("warm"), kernel: get("kernel"), other: get("other"), evict: get("evict"), punch: get("evict"),
    heat: [0, 1, 2, 3, 4].map((i) => get(`heat-${i}`)),
  };
}

const RANK_COLOURS = 7;
// Seven colours by four shapes: 28 ranks look different, since 7 and 4 share no factor.
const SHAPES = ["circle", "triangle", "square", "diamond"];
const SHAPE_SIGNS = ["●", "▲", "■", "◆"];

function rgb(colour) {
  const n = parseInt(colour.slice(1), 16);
  return [n >> 16, (n >> 8) & 255, n & 255];
}

// A colour on the ramp of a heat map; x of 0 to 1.
function rampColour(ramp, x) {
  const at = clamp(x, 0, 1) * (ramp.length - 1);
  const i = Math.min(ramp.length - 2, Math.floor(at));
  const [a, b] = [rgb(ramp[i]), rgb(ramp[i + 1])];
  return a.map((value, k) => Math.round(value + (b[k] - value) * (at - i)));
}

function drawShape(context, shape, x, y, r) {
  context.beginPath();
  if (shape === "circle") context.arc(x, y, r, 0, 2 * Math.PI);
  else if (shape === "square") context.rect(x - r * 0.88, y - r * 0.88, r * 1.76, r * 1.76);
  else if (shape === "triangle") {
    context.moveTo(x, y - r * 1.15);
    context.lineTo(x + r * 1.1, y + r * 0.8);
    context.lineTo(x - r * 1.1, y + r * 0.8);
    context.closePath();
  } else {
    context.moveTo(x, y - r * 1.25);
    context.lineTo(x + r * 1.25, y);
    context.lineTo(x, y + r * 1.25);
    context.lineTo(x - r * 1.25, y);
    context.closePath();
  }
}
