// SPDX-License-Identifier: Apache-2.0
// A picture's frame: canvas, axes, and how it is zoomed, moved and pointed at.

const LEFT = 84, RIGHT = 84, TOP = 8, BOTTOM = 34;
const FONT = "12px system-ui, sans-serif";
const MIN_SPAN_SECONDS = Math.max(1e-6, STEP_SECONDS * 10);

// The span of time that all pictures with a time axis show.
const view = { t0: 0, t1: pictures.seconds };
const plots = [];
const redraws = new Set();
let frame = 0;

function redraw(plot) {
  redraws.add(plot);
  if (!frame) {
    frame = requestAnimationFrame(() => {
      frame = 0;
      const now = [...redraws];
      redraws.clear();
      for (const one of now) one.render();
    });
  }
}

const redrawAll = () => plots.forEach(redraw);

function setTime(t0, t1) {
  const full = pictures.seconds;
  const span = clamp(t1 - t0, Math.min(MIN_SPAN_SECONDS, full), full);
  const start = clamp((t0 + t1 - span) / 2, 0, full - span);
  view.t0 = start;
  view.t1 = start + span;
  for (const plot of plots) if (plot.timed) redraw(plot);
  $("reset").disabled = isWhole();
  onViewChange();
}

const isWhole = () => view.t0 <= 0 && view.t1 >= pictures.seconds
  && plots.every((plot) => !plot.setOffsets || plot.isWholeOffsets());

const history = [];

function remember() {
  const last = { ...view, offsets: plots.map((p) => (p.setOffsets ? [p.o0, p.o1] : null)) };
  if (JSON.stringify(history[history.length - 1]) !== JSON.stringify(last)) history.push(last);
  if (history.length > 50) history.shift();
}

function back() {
  const last = history.pop();
  if (!last) return;
  plots.forEach((plot, i) => last.offsets[i] && plot.setOffsets(...last.offsets[i]));
  setTime(last.t0, last.t1);
}

function resetView() {
  remember();
  for (const plot of plots) if (plot.setOffsets) plot.setOffsets(0, plot.size);
  setTime(0, pictures.seconds);
}

class Plot {
  // holder: where the canvas goes; name: what it shows, for who cannot see it.
  constructor(holder, name, height, { timed = true, bottom = BOTTOM } = {}) {
    this.timed = timed;
    this.height = height;
    this.bottom = bottom;
    this.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": name });
    this.box = el("div", { class: "box", hidden: true });
    this.cursor = el("div", { class: "cursor", hidden: true });
    this.wrap = el("div", { class: "plot", style: { height: `${height}px` } },
      this.canvas, this.cursor, this.box);
    holder.append(this.wrap);
    plots.push(this);
    new ResizeObserver(() => redraw(this)).observe(this.wrap);
    this.listen();
  }

  get plotWidth() { return this.width - LEFT - RIGHT; }
  get plotHeight() { return this.height - TOP - this.bottom; }

  x(seconds) { return LEFT + ((seconds - view.t0) / (view.t1 - view.t0)) * this.plotWidth; }
  seconds(x) { return view.t0 + ((x - LEFT) / this.plotWidth) * (view.t1 - view.t0); }

  render() {
    this.width = Math.max(320, this.wrap.clientWidth);
    this.ratio = Math.min(3, window.devicePixelRatio || 1);
    const [w, h] = [this.width, this.height].map((v) => Math.round(v * this.ratio));
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w;
      this.canvas.height = h;
      Object.assign(this.canvas.style, { width: `${this.width}px`, height: `${this.height}px` });
    }
    const context = this.canvas.getContext("2d", { willReadFrequently: true });
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = FONT;
    this.look = theme();
    context.fillStyle = this.look.back;
    context.fillRect(LEFT, TOP, this.plotWidth, this.plotHeight);
    this.draw(context, this.look);
    context.strokeStyle = this.look.frame;
    context.lineWidth = 1;
    context.strokeRect(LEFT - 0.5, TOP - 0.5, this.plotWidth + 1, this.plotHeight + 1);
  }

  // ---- axes

  timeAxis(context, look, lines = true) {
    const { ticks, unit, from } = timeTicks(view.t0, view.t1, Math.max(2, this.plotWidth / 90));
    this.bottomTicks(context, look, ticks.map((t) => ({ x: this.x(t.at), label: t.label })), lines);
    const name = from ? `time [${unit}] since ${digits9(from)} s` : `time [${unit}]`;
    this.bottomName(context, look, name);
  }

  bottomTicks(context, look, ticks, lines = true) {
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const { x, label } of ticks) {
      if (x < LEFT - 0.5 || x > LEFT + this.plotWidth + 0.5) continue;
      if (lines) this.line(context, look.line, x, TOP, x, TOP + this.plotHeight);
      this.line(context, look.frame, x, TOP + this.plotHeight, x, TOP + this.plotHeight + 4);
      context.fillStyle = look.muted;
      // The last one stays off what stands beside the plot.
      const half = context.measureText(label).width / 2;
      context.fillText(label, Math.min(x, LEFT + this.plotWidth + 4 - half), TOP + this.plotHeight + 6);
    }
  }

  bottomName(context, look, name) {
    context.fillStyle = look.text;
    context.textAlign = "center";
    context.textBaseline = "top";
    context.fillText(name, LEFT + this.plotWidth / 2, TOP + this.plotHeight + 20);
  }

  leftAxis(context, look, ticks, y, name) {
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const tick of ticks) {
      const at = y(tick.at);
      if (at < TOP - 0.5 || at > TOP + this.plotHeight + 0.5) continue;
      this.line(context, look.line, LEFT, at, LEFT + this.plotWidth, at);
      context.fillStyle = look.muted;
      context.fillText(tick.label, LEFT - 7, at);
    }
    context.save();
    context.translate(13, TOP + this.plotHeight / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillStyle = look.text;
    context.fillText(name, 0, 0);
    context.restore();
  }

  line(context, colour, x0, y0, x1, y1, dash = []) {
    context.strokeStyle = colour;
    context.lineWidth = 1;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(Math.round(x0) + 0.5, Math.round(y0) + 0.5);
    context.lineTo(Math.round(x1) + 0.5, Math.round(y1) + 0.5);
    context.stroke();
    context.setLineDash([]);
  }

  clip(context, draw) {
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP, this.plotWidth, this.plotHeight);
    context.clip();
    draw();
    context.restore();
  }

  // ---- pointing

  inside(x, y) {
    return x >= LEFT && x <= LEFT + this.plotWidth && y >= TOP && y <= TOP + this.plotHeight;
  }

  at(event) {
    const rect = this.canvas.getBoundingClientRect();
    return [event.clientX - rect.left, event.clientY - rect.top];
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("pointercancel", () => this.cancel());
    canvas.addEventListener("pointerleave", () => { if (!this.drag) leave(); });
    canvas.addEventListener("dblclick", () => this.timed && resetView());
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  wheel(event) {
    const [x, y] = this.at(event);
    if (!this.timed || !this.inside(x, y)) return;
    // Nothing to zoom out of: the page scrolls.
    if (event.deltaY > 0 && isWhole()) return;
    event.preventDefault();
    const factor = 1.0018 ** clamp(event.deltaY * (event.deltaMode ? 30 : 1), -400, 400);
    this.zoom(factor, x, y, event.altKey ? "y" : event.shiftKey ? "x" : "xy");
  }

  zoom(factor, x, y, axes = "xy") {
    if (axes.includes("x") || !this.setOffsets) {
      const t = this.seconds(x);
      setTime(t - (t - view.t0) * factor, t + (view.t1 - t) * factor);
    }
    if (axes.includes("y") && this.setOffsets) {
      const o = this.offset(y);
      this.setOffsets(o - (o - this.o0) * factor, o + (this.o1 - o) * factor);
    }
  }

  pan(dx, dy) {
    const dt = (dx / this.plotWidth) * (view.t1 - view.t0);
    setTime(view.t0 - dt, view.t1 - dt);
    if (this.setOffsets && dy) {
      const d = (dy / this.plotHeight) * (this.o1 - this.o0);
      this.setOffsets(this.o0 + d, this.o1 + d);
    }
  }

  down(event) {
    const [x, y] = this.at(event);
    if (event.button > 1 || !this.timed || !this.inside(x, y)) return;
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    const pans = event.shiftKey || event.button === 1 || $("drag-pan").checked;
    if (pans) remember();
    this.drag = { x, y, lastX: x, lastY: y, pans, moved: false };
    event.preventDefault();
  }

  move(event) {
    const [x, y] = this.at(event);
    const { drag } = this;
    if (!drag) {
      if (this.inside(x, y)) point(this, x, y, event);
      else leave();
      return;
    }
    drag.moved ||= Math.hypot(x - drag.x, y - drag.y) > 4;
    if (!drag.moved) return;
    leave();
    if (drag.pans) {
      this.pan(x - drag.lastX, y - drag.lastY);
    } else {
      const [x0, x1, y0, y1] = this.boxOf(drag, x, y);
      this.box.hidden = false;
      Object.assign(this.box.style, {
        left: `${x0}px`, top: `${y0}px`, width: `${x1 - x0}px`, height: `${y1 - y0}px`,
      });
    }
    drag.lastX = x;
    drag.lastY = y;
  }

  boxOf(drag, x, y) {
    const cx = (v) => clamp(v, LEFT, LEFT + this.plotWidth);
    const cy = (v) => clamp(v, TOP, TOP + this.plotHeight);
    const [x0, x1] = [cx(drag.x), cx(x)].sort((a, b) => a - b);
    const [y0, y1] = [cy(drag.y), cy(y)].sort((a, b) => a - b);
    // A box that is nearly a line means time only, as it does where there is no offset.
    if (!this.setOffsets || y1 - y0 < 6) return [x0, x1, TOP, TOP + this.plotHeight];
    return [x0, x1, y0, y1];
  }

  up(event) {
    const { drag } = this;
    this.cancel();
    if (!drag || drag.pans || !drag.moved) return;
    const [x0, x1, y0, y1] = this.boxOf(drag, ...this.at(event));
    if (x1 - x0 < 4) return;
    remember();
    const [t0, t1] = [this.seconds(x0), this.seconds(x1)];
    if (this.setOffsets) this.setOffsets(this.offset(y1), this.offset(y0));
    setTime(t0, t1);
  }

  cancel() {
    this.drag = null;
    this.box.hidden = true;
  }

  key(event) {
    if (!this.timed || event.ctrlKey || event.metaKey) return;
    const [cx, cy] = [LEFT + this.plotWidth / 2, TOP + this.plotHeight / 2];
    const axes = event.altKey ? "y" : event.shiftKey && event.key.startsWith("Arrow") ? "x" : "xy";
    const actions = {
      ArrowLeft: () => this.pan(this.plotWidth / 8, 0),
      ArrowRight: () => this.pan(-this.plotWidth / 8, 0),
      ArrowUp: () => this.pan(0, this.plotHeight / 8),
      ArrowDown: () => this.pan(0, -this.plotHeight / 8),
      "+": () => this.zoom(0.6, cx, cy, axes),
      "=": () => this.zoom(0.6, cx, cy, axes),
      "-": () => this.zoom(1 / 0.6, cx, cy, axes),
      Backspace: back,
      Home: resetView,
      0: resetView,
    };
    const action = actions[event.key];
    if (!action || (event.key.startsWith("ArrowU") || event.key.startsWith("ArrowD"))
      && (!this.setOffsets || this.isWholeOffsets())) return;
    event.preventDefault();
    action();
  }

  // What is at a place: lines of text, or null. For each picture its own.
  tell() { return null; }
}

const digits9 = (x) => Number(x.toPrecision(9)).toString();

// ---- the pointer over all pictures -----------------------------------------------------------

function point(plot, x, y, event) {
  if (plot.timed) {
    const seconds = plot.seconds(x);
    for (const other of plots) {
      other.cursor.hidden = !other.timed;
      if (other.timed) other.cursor.style.left = `${other.x(seconds)}px`;
    }
  }
  const lines = plot.tell(x, y);
  const tip = $("tip");
  tip.hidden = !lines;
  if (!lines) return;
  tip.replaceChildren(...lines.map((line, i) => el("div", { class: i ? null : "first" }, line)));
  const { width, height } = tip.getBoundingClientRect();
  const right = event.clientX + 16 + width > window.innerWidth;
  const low = event.clientY + 16 + height > window.innerHeight;
  tip.style.left = `${right ? Math.max(4, event.clientX - width - 14) : event.clientX + 16}px`;
  tip.style.top = `${low ? Math.max(4, event.clientY - height - 12) : event.clientY + 16}px`;
}

function leave() {
  $("tip").hidden = true;
  for (const plot of plots) plot.cursor.hidden = true;
}
