// SPDX-License-Identifier: Apache-2.0
// The access map: offset over time of one file, from all accesses down to single ones.

// So many marks in view are unpacked; more only when the picture is zoomed in offset.
const DETAIL_MARKS = 3e6, DETAIL_MARKS_MOST = 1.4e7, KEEP_MARKS = 1.5e7;
// So few are drawn as shapes, with their ranges and waits.
const SHAPE_MARKS = 1500;
// So few misses are crosses among marks that are pixels, so that none is overlooked.
const CROSSES = 400;
// While the view moves, more than this is drawn as cells.
const MOVING_MARKS = 4e5, MOVING_MS = 160;

const shown = {
  ranks: new Map(pictures.ranks.map((rank) => [rank, true])),
  kinds: new Map(pictures.kinds.map((kind) => [kind, pictures.layer_of[kind] !== "evict"])),
};
const isShown = (piece) => shown.kinds.get(piece.kind)
  && (piece.rank < 0 || shown.ranks.get(piece.rank) !== false);
const rankPlace = new Map(pictures.ranks.map((rank, i) => [rank, i]));
const rankColour = (rank) => (rankPlace.get(rank) ?? 0) % RANK_COLOURS;
const rankShape = (rank) => SHAPES[(rankPlace.get(rank) ?? 0) % SHAPES.length];
const rankName = (rank) => (rank >= 0 ? `rank ${rank}` : "no rank");

const allWindows = new Windows(pictures.windows);
let cells = null;
let lastChange = -Infinity;
let settle = 0;

function onViewChange() {
  lastChange = performance.now();
}

class AccessMap extends Plot {
  constructor(holder, file, status) {
    super(holder, `Access map of ${file.path}`, 460);
    this.file = file;
    this.size = file.size_bytes;
    this.o0 = 0;
    this.o1 = this.size;
    this.status = status;
    this.raster = null;
    this.stall = stallByOffset(file);
    this.drawn = { mode: "none", marks: 0, by_rank: {}, by_kind: {} };
  }

  isWholeOffsets() { return this.o0 <= 0 && this.o1 >= this.size; }

  setOffsets(o0, o1) {
    const least = Math.min(this.size, pictures.page_bytes * 4);
    const span = clamp(o1 - o0, least, this.size);
    this.o0 = clamp((o0 + o1 - span) / 2, 0, this.size - span);
    this.o1 = this.o0 + span;
    $("reset").disabled = isWhole();
    onViewChange();
    redraw(this);
  }

  y(offset) { return TOP + (1 - (offset - this.o0) / (this.o1 - this.o0)) * this.plotHeight; }
  offset(y) { return this.o1 - ((y - TOP) / this.plotHeight) * (this.o1 - this.o0); }

  // ---- what is drawn from what

  // Windows of single marks in view, and whether all of them can be unpacked at once.
  plan() {
    const { t0, t1 } = view;
    const windows = allWindows.between(t0, t1);
    let marks = 0;
    for (const w of windows) {
      const part = (Math.min(t1, w.end) - Math.max(t0, w.start)) / Math.max(1e-12, w.end - w.start);
      marks += w.marks * clamp(part, 0, 1);
    }
    const loaded = windows.reduce((sum, w) => sum + w.marks, 0);
    const tall = (this.o1 - this.o0) < this.size / 3;
    let detail = !cells || (loaded <= (tall ? DETAIL_MARKS_MOST : DETAIL_MARKS));
    if (detail && cells && marks > MOVING_MARKS) {
      const rest = MOVING_MS - (performance.now() - lastChange);
      if (rest > 0) {
        detail = false;
        clearTimeout(settle);
        settle = setTimeout(() => { settle = 0; redrawAll(); }, rest + 10);
      }
    }
    if (!detail) return { ready: [], wanted: [], spans: [[t0, t1]] };
    // Bands that began one window earlier still last.
    const first = allWindows.list.indexOf(windows[0]);
    if (first > 0) windows.unshift(allWindows.list[first - 1]);
    const ready = windows.filter((w) => w.state === "ready");
    const spans = [];
    let at = t0;
    for (const w of ready) {
      if (w.start > at) spans.push([at, w.start]);
      at = Math.max(at, w.end);
    }
    if (at < t1) spans.push([at, t1]);
    return { ready, wanted: windows.filter((w) => w.state !== "absent"), spans };
  }

  draw(context, look) {
    const w = Math.round(this.plotWidth * this.ratio), h = Math.round(this.plotHeight * this.ratio);
    if (!this.raster || this.raster.w !== w || this.raster.h !== h) this.raster = new Raster(w, h);
    else this.raster.clear();
    this.kx = w / (view.t1 - view.t0);
    this.ky = h / (this.o1 - this.o0);
    const plan = this.plan();
    this.pending = plan.wanted.some((one) => one.state === "packed" || one.state === "loading");
    if (this.pending) allWindows.want(plan.wanted, KEEP_MARKS);
    this.segments = [];
    this.drawn = { mode: "none", marks: 0, by_rank: {}, by_kind: {} };
    const byCells = cells && plan.spans.length ? this.drawCells(plan.spans) : 0;
    const found = this.visible(plan.ready);
    const few = found.marks <= SHAPE_MARKS;
    const size = few ? 0 : this.ratio * (found.marks < 4e4 ? 3 : found.marks < 4e5 ? 2 : 1);
    for (const one of found.pieces) {
      if (!few || one.piece.layer === "ahead" || one.piece.layer === "evict") {
        this.rasterize(one, size || 2 * this.ratio);
      }
    }
    const faintest = byCells || found.marks > 4e4 ? 0.5 : 0.92;
    context.putImageData(this.raster.image(context, look, faintest),
      Math.round(LEFT * this.ratio), Math.round(TOP * this.ratio));
    this.shapes = few ? this.drawShapes(context, look, found) : null;
    if (!few) this.drawCrosses(context, look, found);
    this.drawn.mode = byCells ? (found.marks ? "cells and marks" : "cells") : few ? "shapes" : "marks";
    this.axes(context, look, plan);
    this.tellStatus(byCells);
  }

  axes(context, look, plan) {
    this.timeAxis(context, look, false);
    const { ticks, unit, from } = byteTicks(this.o0, this.o1, this.plotHeight / 42);
    const place = from ? `after ${exactBytesText(from)}` : "in the file";
    this.leftAxis(context, { ...look, line: "#00000000" }, ticks, (o) => this.y(o),
      `offset ${place} [${unit}]`);
    for (const tick of ticks) {
      const y = this.y(tick.at);
      if (y > TOP && y < TOP + this.plotHeight) this.line(context, look.frame, LEFT - 4, y, LEFT, y);
    }
    this.drawEpochs(context, look);
    this.drawStall(context, look);
    if (!allWindows.list.some((w) => w.state === "absent") && !cells) return;
    // Where single marks are to be had, if not everywhere.
    const until = pictures.raw_until_seconds ?? Infinity;
    if (!allWindows.list.some((w) => w.state === "absent") && until === Infinity) return;
    context.fillStyle = look.accent;
    for (const w of allWindows.between(view.t0, view.t1)) {
      if (w.state === "absent") continue;
      const [x0, x1] = [Math.max(LEFT, this.x(w.start)), Math.min(LEFT + this.plotWidth, this.x(w.end))];
      context.fillRect(x0, TOP + this.plotHeight + 1, Math.max(1, x1 - x0), 3);
    }
  }

  // Where each rank's later epochs begin: a wedge in its colour at the upper edge.
  drawEpochs(context, look) {
    for (const epoch of pictures.epochs) {
      if (epoch.file !== this.file.id || !epoch.index || !shown.ranks.get(epoch.rank)) continue;
      const x = this.x(epoch.start_seconds);
      if (x < LEFT || x > LEFT + this.plotWidth) continue;
      context.fillStyle = look.ranks[rankColour(epoch.rank)];
      context.strokeStyle = look.back;
      context.beginPath();
      context.moveTo(x, TOP + 8);
      context.lineTo(x - 5, TOP - 1);
      context.lineTo(x + 5, TOP - 1);
      context.closePath();
      context.fill();
      context.stroke();
    }
  }

  // To the right: where in the file the ranks that are shown stood still.
  drawStall(context, look) {
    if (!this.stall.length) return;
    const rows = 64, sums = new Float64Array(rows), height = (this.o1 - this.o0) / rows;
    for (const { rank, bins, width } of this.stall) {
      if (!shown.ranks.get(rank)) continue;
      for (const [offset, seconds] of bins) {
        const [low, high] = [offset, offset + width].map((o) => (o - this.o0) / height);
        const last = Math.min(rows - 1, Math.floor(high));
        for (let row = Math.max(0, Math.floor(low)); row <= last; row += 1) {
          const part = Math.min(high, row + 1) - Math.max(low, row);
          sums[row] += seconds * (part / (high - low));
        }
      }
    }
    const most = Math.max(...sums);
    const x0 = LEFT + this.plotWidth + 8, width = RIGHT - 26;
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillStyle = look.text;
    context.font = "11px system-ui, sans-serif";
    context.fillText("stall by offset", x0, TOP + this.plotHeight + 6, RIGHT - 10);
    context.fillText(most ? `0 to ${secondsText(most)}` : "none in view", x0,
      TOP + this.plotHeight + 20, RIGHT - 10);
    context.font = FONT;
    this.line(context, look.frame, x0 - 1, TOP, x0 - 1, TOP + this.plotHeight);
    if (!most) return;
    context.fillStyle = look.major;
    const each = this.plotHeight / rows;
    sums.forEach((sum, row) => {
      const y = TOP + this.plotHeight - (row + 1) * each;
      if (sum) context.fillRect(x0, y + 0.5, Math.max(1, (sum / most) * width), each - 1);
    });
  }

  // ---- cells

  drawCells(spans) {
    const { columns, rows } = cells;
    const perColumn = pictures.seconds / columns, perRow = this.size / rows;
    const wanted = new Uint8Array(columns);
    for (const [t0, t1] of spans) {
      const last = Math.min(columns - 1, Math.ceil(t1 / perColumn));
      wanted.fill(1, Math.max(0, Math.floor(t0 / perColumn)), last + 1);
    }
    const c0 = Math.max(0, Math.floor(view.t0 / perColumn));
    const c1 = Math.min(columns, Math.ceil(view.t1 / perColumn) + 1);
    const least = Math.round(1.6 * this.ratio);
    let filled = 0;
    for (const piece of cells.pieces) {
      if (piece.file !== this.file.id || !isShown(piece)) continue;
      const colour = rankColour(piece.rank);
      const from = lowerBound(piece.index, c0 * rows), to = lowerBound(piece.index, c1 * rows);
      let marks = 0;
      for (let i = from; i < to; i += 1) {
        const column = Math.floor(piece.index[i] / rows), row = piece.index[i] % rows;
        if (!wanted[column]) continue;
        const x0 = (column * perColumn - view.t0) * this.kx;
        const y1 = this.raster.h - (row * perRow - this.o0) * this.ky;
        // Whole pixels that touch and do not overlap, but no less than can be seen.
        const left = Math.round(x0), low = Math.round(y1);
        const done = this.put(piece, piece.count[i], colour, left,
          Math.min(low - least, Math.round(y1 - perRow * this.ky)),
          Math.max(left + least, Math.round(x0 + perColumn * this.kx)), low, 0);
        if (done) {
          filled += 1;
          marks += piece.count[i];
        }
      }
      this.count(piece, marks);
    }
    return filled;
  }

  put(piece, weight, colour, x0, y0, x1, y1, pick) {
    const { raster } = this;
    if (piece.layer === "demand") return raster.demand(x0, y0, x1, y1, weight, colour, pick);
    if (piece.layer === "miss") {
      return raster.fill(raster.miss, piece.kind === "late" ? 2 : 1, x0, y0, x1, y1, pick);
    }
    if (piece.layer === "evict") return raster.fill(raster.evicted, 1, x0, y0, x1, y1);
    return raster.fill(raster.band, BAND_CODES[piece.kind], x0, y0, x1, y1);
  }

  count(piece, marks) {
    if (!marks) return;
    const { drawn } = this;
    drawn.marks += marks;
    drawn.by_kind[piece.kind] = (drawn.by_kind[piece.kind] ?? 0) + marks;
    if (piece.layer === "demand" || piece.layer === "miss") {
      drawn.by_rank[piece.rank] = (drawn.by_rank[piece.rank] ?? 0) + marks;
    }
  }

  // ---- single marks

  // Per piece: the marks from..to that begin in view (of bands: all that might still last).
  visible(windows) {
    const pieces = [];
    let marks = 0;
    const s0 = view.t0 / STEP_SECONDS, s1 = view.t1 / STEP_SECONDS;
    for (const w of windows) {
      for (const piece of w.pieces) {
        if (piece.file !== this.file.id || !isShown(piece)) continue;
        const lasts = piece.layer === "ahead" || piece.layer === "miss";
        const from = lasts ? 0 : lowerBound(piece.start, s0), to = lowerBound(piece.start, s1);
        if (from >= to) continue;
        pieces.push({ piece, from, to });
        if (piece.layer === "ahead" || piece.layer === "evict") continue;
        if (to - from + marks > SHAPE_MARKS * 40) marks += to - from;
        else for (let i = from; i < to; i += 1) if (this.meets(piece, i)) marks += 1;
      }
    }
    return { pieces, marks };
  }

  meets(piece, i) {
    const low = (piece.offset[i] - piece.before[i]) * piece.unit;
    const t = piece.start[i] * STEP_SECONDS;
    return low + piece.length[i] * piece.unit > this.o0 && low < this.o1
      && (t >= view.t0 || t + this.lasted(piece, i) >= view.t0);
  }

  lasted(piece, i) { return piece.duration[i] * piece.durationScale * 1e-9; }

  rasterize({ piece, from, to }, size) {
    const colour = rankColour(piece.rank);
    const base = this.segments.length
      ? this.segments[this.segments.length - 1].base + this.segments[this.segments.length - 1].n : 1;
    this.segments.push({ piece, base, n: piece.n });
    const { unit } = piece;
    const isBand = piece.layer === "ahead";
    const { h } = this.raster;
    let marks = 0;
    for (let i = from; i < to; i += 1) {
      const t = piece.start[i] * STEP_SECONDS;
      const entered = piece.offset[i] * unit, low = entered - piece.before[i] * unit;
      let x0 = (t - view.t0) * this.kx, x1 = x0;
      let y0 = h - (low + piece.length[i] * unit - this.o0) * this.ky;
      let y1 = h - (low - this.o0) * this.ky;
      if (isBand) {
        x1 = Math.max(x0 + this.ratio, x0 + this.lasted(piece, i) * this.kx);
      } else {
        x0 -= size / 2;
        x1 = x0 + size;
      }
      if (!isBand && y1 - y0 < size) {
        y0 = h - (entered - this.o0) * this.ky - size / 2;
        y1 = y0 + size;
      }
      // Whole pixels, so that a mark of two is two and not three.
      const left = Math.round(x0), top = Math.round(y0);
      if (this.put(piece, 1, colour, left, top, left + Math.max(1, Math.round(x1 - x0)),
        top + Math.max(1, Math.round(y1 - y0)), base + i)) marks += 1;
    }
    this.count(piece, marks);
  }

  drawShapes(context, look, found) {
    const list = [];
    this.clip(context, () => {
      for (const { piece, from, to } of found.pieces) {
        if (piece.layer === "evict") continue;
        let marks = 0;
        for (let i = from; i < to; i += 1) {
          if (!this.meets(piece, i)) continue;
          const mark = { piece, i, ...this.corners(piece, i) };
          list.push(mark);
          marks += 1;
        }
        if (piece.layer !== "ahead") this.count(piece, marks);
      }
      for (const mark of list) if (mark.piece.layer === "ahead") outline(context, look, mark);
      // The more there are, the smaller they are.
      const r = found.marks < 200 ? 4.5 : found.marks < 600 ? 3.2 : 2.3;
      for (const mark of list) if (mark.piece.layer === "demand") access(context, look, mark, r);
      for (const mark of list) if (mark.piece.layer === "miss") missed(context, look, mark, r);
    });
    return list;
  }

  drawCrosses(context, look, { pieces }) {
    const misses = pieces.filter(({ piece }) => piece.layer === "miss");
    const list = [];
    for (const { piece, from, to } of misses) {
      for (let i = from; i < to; i += 1) {
        if (!this.meets(piece, i)) continue;
        if (list.length >= CROSSES) return;
        list.push({ piece, ...this.corners(piece, i) });
      }
    }
    this.clip(context, () => list.forEach((mark) => missed(context, look, mark)));
  }

  // Of a mark, in CSS pixels: its moment, its end, where it was entered, its range.
  corners(piece, i) {
    const t = piece.start[i] * STEP_SECONDS;
    const entered = piece.offset[i] * piece.unit;
    const low = entered - piece.before[i] * piece.unit;
    return {
      x: this.x(t), x1: this.x(t + this.lasted(piece, i)), y: this.y(entered),
      y0: this.y(low + piece.length[i] * piece.unit), y1: this.y(low),
    };
  }
}

function stallByOffset({ id, size_bytes: size }) {
  return (report.readers ?? [])
    .filter((reader) => reader.file === id && reader.stall_by_offset?.length)
    .map(({ rank, stall_by_offset: bins }) => {
      // As wide as the nearest two are apart; the empty ones are left out.
      const apart = bins.slice(1).map(([offset], i) => offset - bins[i][0]);
      return { rank, bins, width: Math.min(...apart, size / 64) };
    });
}
