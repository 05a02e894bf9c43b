// SPDX-License-Identifier: Apache-2.0
// What stands packed in the page (report/pack.py), unpacked when it is looked at.

const head = JSON.parse($("head").textContent);
const report = head.report;
const pictures = head.pictures;

const FRAME = 0, RISING = 1, JUMPING = 2, LOGARITHM = 3, REMAINDER = 4, SIGNED = 5;

function bytesOfBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

async function blob(id) {
  // The page is drawn while its end is still being read.
  if (!$(id) && document.readyState === "loading") {
    await new Promise((done) => document.addEventListener("DOMContentLoaded", done));
  }
  const packed = bytesOfBase64($(id).textContent);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const index = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  return { index, bytes, at: 4 + length };
}

// One column as numbers in `scale`; `from` is moved over its planes.
function column(from, n, [mode, planes, base, scale]) {
  const { bytes } = from;
  if (!planes && mode !== RISING && mode !== JUMPING) {
    return { scale, values: new Float64Array(n).fill(mode === LOGARITHM ? 0 : base) };
  }
  const values = new Float64Array(n);
  for (let plane = 0; plane < planes; plane += 1, from.at += n) {
    const at = from.at;
    const factor = 256 ** plane;
    for (let i = 0; i < n; i += 1) values[i] += bytes[at + i] * factor;
  }
  let sum = base, most = 0, least = 0;
  for (let i = 0; i < n; i += 1) {
    const value = values[i];
    if (mode === FRAME) sum = base + value;
    else if (mode === RISING) sum += value;
    else if (mode === JUMPING) sum += value % 2 ? -(value + 1) / 2 : value / 2;
    else if (mode === SIGNED) sum = base + (value % 2 ? -(value + 1) / 2 : value / 2);
    else sum = 1000 * (2 ** (value / 16) - 1);
    values[i] = sum;
    if (sum > most) most = sum;
    else if (sum < least) least = sum;
  }
  // Half the memory where that is enough.
  const half = mode === LOGARITHM ? Float32Array : most < 2 ** 32 && least >= 0 ? Uint32Array : Float64Array;
  return { scale, values: half === Float64Array ? values : half.from(values) };
}

// ---- single marks, by window of time ---------------------------------------------------------

// A piece: the marks of one file, rank and kind in one window. Times are in steps, offsets, lengths
// and how far into its range a mark was entered in units of bytes, durations in ns.
function piece(from, [file, rank, kind, n, columns, near], pieces) {
  const [start, offset, before, length, duration] = columns.slice(near === undefined ? 0 : 1);
  const base = pieces[near];
  const which = base && column(from, n, columns[0]).values;
  const starts = column(from, n, start).values;
  const offsets = column(from, n, offset);
  const unpacked = {
    file, rank, kind: pictures.kinds[kind], n,
    start: starts, offset: offsets.values, unit: offsets.scale,
  };
  if (base) {
    // Told as differences to an access of the same rank.
    const factor = base.unit / unpacked.unit;
    unpacked.start = Float64Array.from(starts, (x, i) => x + base.start[which[i]]);
    unpacked.offset = Float64Array.from(offsets.values, (x, i) => x + base.offset[which[i]] * factor);
  }
  unpacked.layer = pictures.layer_of[unpacked.kind];
  if (before[0] !== REMAINDER) unpacked.before = column(from, n, before).values;
  const lengths = column(from, n, length);
  unpacked.length = lengths.values;
  if (before[0] === REMAINDER) {
    unpacked.before = unpacked.offset.map((offset, i) => (
      ((offset * offsets.scale + before[2]) % Math.max(1, unpacked.length[i] * offsets.scale))
      / offsets.scale
    ));
  }
  const took = column(from, n, duration);
  unpacked.duration = took.values;
  unpacked.durationScale = took.scale;
  return unpacked;
}

const STEP_SECONDS = pictures.step_ns / 1e9;

class Windows {
  constructor(list) {
    this.list = list.map(([start, end, marks, packed], i) => ({
      start, end, marks, id: `w${i}`, state: packed ? "packed" : "absent", pieces: null, used: 0,
    }));
    this.changed = () => {};
    this.busy = 0;
    this.clock = 0;
  }

  // Those that a span of time meets.
  between(t0, t1) {
    return this.list.filter((w) => w.end >= t0 && w.start <= t1);
  }

  // Unpack what is wanted, one after the other; what was not used for longest is forgotten.
  async want(windows, keepMarks) {
    this.clock += 1;
    for (const w of windows) w.used = this.clock;
    this.wanted = windows;
    if (this.busy) return;
    this.busy = 1;
    for (;;) {
      const next = this.wanted.find((w) => w.state === "packed");
      if (!next) break;
      next.state = "loading";
      const from = await blob(next.id);
      const pieces = [];
      for (const entry of from.index) pieces.push(piece(from, entry, pieces));
      next.pieces = pieces;
      next.state = "ready";
      this.forget(keepMarks);
      this.changed();
    }
    this.busy = 0;
    this.changed();
  }

  forget(keepMarks) {
    const ready = this.list.filter((w) => w.state === "ready").sort((a, b) => a.used - b.used);
    let marks = ready.reduce((sum, w) => sum + w.marks, 0);
    for (const w of ready) {
      if (marks <= keepMarks || w.used === this.clock) break;
      w.pieces = null;
      w.state = "packed";
      marks -= w.marks;
    }
  }
}

// ---- all marks, in cells ---------------------------------------------------------------------

async function loadCells() {
  if (!pictures.grid) return null;
  const from = await blob("cells");
  const { columns, rows } = pictures.grid;
  return {
    columns, rows,
    pieces: from.index.map(([file, rank, kind, n, [index, count]]) => ({
      file, rank, n, kind: pictures.kinds[kind], layer: pictures.layer_of[pictures.kinds[kind]],
      index: column(from, n, index).values,
      count: column(from, n, count).values.map((code) => Math.round(2 ** (code / 16))),
    })),
  };
}

// First index of a rising array whose value is not below x.
function lowerBound(values, x) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}
