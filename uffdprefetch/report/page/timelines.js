// SPDX-License-Identifier: Apache-2.0
// Epochs, system calls and iterations.

// Epochs as bars, one row per rank; of several files the one with most marks is drawn last.
class EpochChart extends Plot {
  constructor(holder) {
    super(holder, "Epochs by rank over time", rowsHeight(pictures.ranks.length));
    const place = new Map(pictures.files.map((file, i) => [file.id, i]));
    this.epochs = pictures.epochs.filter((epoch) => place.has(epoch.file))
      .sort((a, b) => place.get(b.file) - place.get(a.file));
    this.names = new Map(pictures.files.map((file) => [file.id, lastPart(file.path)]));
  }

  draw(context, look) {
    const each = this.plotHeight / pictures.ranks.length;
    this.timeAxis(context, look);
    this.clip(context, () => {
      for (const epoch of this.epochs) {
        if (!rankOn(epoch.rank)) continue;
        const [x0, x1] = [this.x(epoch.start_seconds), this.x(epoch.end_seconds)];
        const y = TOP + rankPlace.get(epoch.rank) * each + Math.min(3, each * 0.12);
        const height = each - Math.min(6, each * 0.24);
        context.fillStyle = look.ranks[rankColour(epoch.rank)];
        context.globalAlpha = epoch.index % 2 ? 0.25 : 0.42;
        context.fillRect(x0, y, Math.max(1, x1 - x0 - 1), height);
        context.globalAlpha = 1;
        context.strokeStyle = context.fillStyle;
        context.strokeRect(x0 + 0.5, y + 0.5, Math.max(1, x1 - x0 - 2), height - 1);
        this.label(context, look, epoch, x0, x1, y + height / 2, each);
      }
    });
    rankLabels(this, context, look, each);
  }

  label(context, look, epoch, x0, x1, y, each) {
    const from = Math.max(x0, LEFT), room = Math.min(x1, LEFT + this.plotWidth) - from - 10;
    const file = this.names.size > 1 ? `${this.names.get(epoch.file)}, ` : "";
    const texts = [`${file}epoch ${epoch.index + 1}: ${epoch.pattern ?? "?"}`, `epoch ${epoch.index + 1}`,
      String(epoch.index + 1)];
    const text = texts.find((one) => context.measureText(one).width <= room);
    if (!text || each < 14) return;
    context.fillStyle = look.text;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(text, from + 5, y);
  }

  tell(x, y) {
    const rank = pictures.ranks[Math.floor(((y - TOP) / this.plotHeight) * pictures.ranks.length)];
    const t = this.seconds(x);
    const epoch = this.epochs.findLast((e) => (
      e.rank === rank && t >= e.start_seconds && t <= e.end_seconds));
    if (!epoch) return null;
    const lines = [`rank ${rank}, epoch ${epoch.index + 1}: ${epoch.pattern ?? "pattern unknown"}`,
      ...(this.names.size > 1 ? [this.names.get(epoch.file)] : []),
      `${secondsText(epoch.start_seconds)} to ${secondsText(epoch.end_seconds)}`];
    if (epoch.touched_pages != null) lines.push(`${plural(epoch.touched_pages, "page")} touched`
      + (epoch.reread_pages ? `, ${countText(epoch.reread_pages)} of them before, too` : ""));
    if (epoch.major != null) lines.push(`${plural(epoch.major, "major fault")}`
      + (epoch.faults != null ? ` of ${countText(epoch.faults)}` : ""));
    if (epoch.stall_seconds != null) lines.push(`${secondsText(epoch.stall_seconds)} stalled`);
    return lines;
  }
}

// LMDB's data file is called after its folder.
function lastPart(path) {
  const parts = path.split("/");
  return (parts[parts.length - 1] === "data.mdb" ? parts.slice(-2) : parts.slice(-1)).join("/");
}

const hash01 = (i) => {
  let h = Math.imul(i + 1, 0x9e3779b1);
  h = Math.imul(h ^ (h >>> 15), 0x85ebca6b);
  return ((h ^ (h >>> 13)) >>> 0) / 2 ** 32;
};

class CallChart extends Plot {
  constructor(holder) {
    super(holder, "System calls over time", TOP + BOTTOM + 22 + 40 * pictures.calls.length);
  }

  y(row, i) {
    const each = (this.plotHeight - 18) / pictures.calls.length;
    return TOP + 18 + each * (row + 0.18 + 0.64 * hash01(i));
  }

  draw(context, look) {
    this.timeAxis(context, look);
    this.clip(context, () => this.phases(context, look));
    const each = (this.plotHeight - 18) / pictures.calls.length;
    context.textAlign = "right";
    context.textBaseline = "middle";
    pictures.calls.forEach((call, row) => {
      const middle = TOP + 18 + each * (row + 0.5);
      context.textAlign = "right";
      context.fillStyle = look.text;
      context.fillText(call.name, LEFT - 7, middle);
      context.textAlign = "left";
      context.fillStyle = look.muted;
      context.fillText(countText(call.count), LEFT + this.plotWidth + 8, middle);
      if (row) this.line(context, look.line, LEFT, middle - each / 2, LEFT + this.plotWidth, middle - each / 2);
      this.clip(context, () => {
        const size = call.seconds.length > 4000 ? 2 : 3;
        for (let i = 0; i < call.seconds.length; i += 1) {
          if (shown.ranks.get(call.rank[i]) === false) continue;
          const x = this.x(call.seconds[i]);
          if (x < LEFT - 3 || x > LEFT + this.plotWidth + 3) continue;
          context.fillStyle = call.rank[i] < 0 ? look.muted : look.ranks[rankColour(call.rank[i])];
          context.fillRect(x - size / 2, this.y(row, i) - size / 2, size, size);
        }
      });
    });
    context.textAlign = "left";
    context.fillStyle = look.muted;
    context.fillText("calls", LEFT + this.plotWidth + 8, TOP + 9);
  }

  // Bands with a name each; every other one is shaded, and a name that has no room is left out.
  phases(context, look) {
    pictures.phases.forEach((phase, i) => {
      const x0 = this.x(phase.start_seconds), x1 = this.x(phase.end_seconds);
      if (i % 2 === 0) {
        context.fillStyle = look.band;
        context.fillRect(x0, TOP, x1 - x0, this.plotHeight);
      }
      this.line(context, look.frame, x0, TOP, x0, TOP + this.plotHeight, [3, 3]);
      const from = Math.max(LEFT, x0);
      const room = Math.min(x1, LEFT + this.plotWidth) - from - 8;
      if (context.measureText(phase.name).width > room) return;
      context.textAlign = "left";
      context.textBaseline = "middle";
      context.fillStyle = look.text;
      context.fillText(phase.name, from + 5, TOP + 9);
    });
  }

  tell(x, y) {
    const t = this.seconds(x);
    const lines = [];
    const row = Math.floor((y - TOP - 18) / ((this.plotHeight - 18) / pictures.calls.length));
    const call = pictures.calls[row];
    if (call) lines.push(`${call.name}: ${plural(call.count, "call")} in the whole trace`);
    const phase = pictures.phases.find((p) => t >= p.start_seconds && t < p.end_seconds);
    if (phase) lines.push(`${phase.name}: ${phase.why ?? ""}`);
    return [`at ${secondsText(t)}`, ...lines];
  }
}

class IterationChart extends Plot {
  constructor(holder) {
    super(holder, "Time of each iteration", 240, { timed: false });
    this.points = [];
  }

  draw(context, look) {
    const readers = pictures.iterations.filter((reader) => rankOn(reader.rank));
    const count = Math.max(1, ...readers.map((r) => r.seconds.length * r.step));
    const most = Math.max(1e-9, ...readers.map((r) => r.seconds.reduce((a, b) => Math.max(a, b), 0)));
    const px = (i) => LEFT + 6 + (i / count) * (this.plotWidth - 12);
    const y = (s) => TOP + (1 - s / (most * 1.06)) * this.plotHeight;
    const [scale, unit] = most >= 0.8 ? [1, "s"] : most >= 8e-4 ? [1e3, "ms"] : [1e6, "µs"];
    const whole = plainTicks(0, count, Math.max(2, this.plotWidth / 90), (i) => countText(i))
      .filter((tick) => Number.isInteger(tick.at));
    this.bottomTicks(context, look, whole.map((t) => ({ x: px(t.at), label: t.label })));
    this.bottomName(context, look, "iteration");
    const ticks = plainTicks(0, most * 1.06 * scale, 5, digits3);
    this.leftAxis(context, look, ticks, (v) => y(v / scale), `time of an iteration [${unit}]`);
    this.points = [];
    const r = count * readers.length > 2500 ? 1.6 : 3;
    this.clip(context, () => {
      this.epochs(context, look, readers, px);
      for (const reader of readers) {
        context.fillStyle = look.ranks[rankColour(reader.rank)];
        const shape = rankShape(reader.rank);
        reader.seconds.forEach((seconds, i) => {
          const [x, at] = [px(i * reader.step), y(seconds)];
          this.points.push({ x, y: at, reader, i });
          if (r < 2) context.fillRect(x - r, at - r, 2 * r, 2 * r);
          else {
            drawShape(context, shape, x, at, r);
            context.fill();
          }
        });
      }
    });
  }

  // Where the first rank's epochs end: [Stanovnik] figure 9 shows the step there.
  epochs(context, look, readers, px) {
    const reader = readers[0];
    if (!reader?.start_seconds?.length) return;
    for (const epoch of pictures.epochs) {
      if (epoch.rank !== reader.rank || epoch.file !== reader.file || !epoch.index) continue;
      const i = reader.start_seconds.findIndex((s) => s >= epoch.start_seconds - 1e-9);
      if (i < 0) continue;
      const x = px((i - 0.5) * reader.step);
      this.line(context, look.muted, x, TOP, x, TOP + this.plotHeight, [4, 3]);
      context.fillStyle = look.muted;
      context.textAlign = "left";
      context.textBaseline = "top";
      context.fillText(`epoch ${epoch.index + 1}`, x + 4, TOP + 4);
    }
  }

  tell(x, y) {
    let best = 10 ** 2, near = null;
    for (const point of this.points) {
      const distance = (point.x - x) ** 2 + (point.y - y) ** 2;
      if (distance < best) {
        best = distance;
        near = point;
      }
    }
    if (!near) return null;
    const { reader, i } = near;
    const lines = [`rank ${reader.rank}, iteration ${countText(i * reader.step)}`,
      secondsText(reader.seconds[i])];
    if (reader.stall_seconds?.[i] != null) lines.push(`${secondsText(reader.stall_seconds[i])} of it stalled`);
    if (reader.start_seconds?.[i] != null) lines.push(`began at ${secondsText(reader.start_seconds[i])}`);
    return lines;
  }
}
