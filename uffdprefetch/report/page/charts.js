// SPDX-License-Identifier: Apache-2.0
// Quantities over time: hits, bytes, stall.

const series = pictures.series;

// Bins of series in view, a few pixels wide at least: calls back with x0, x1 and the bins' numbers.
function eachStep(plot, least, draw) {
  const per = plot.plotWidth * (series.bin_seconds / (view.t1 - view.t0));
  const group = Math.max(1, Math.ceil(least / per));
  const first = Math.floor(view.t0 / series.bin_seconds / group) * group;
  for (let bin = Math.max(0, first); bin < series.bins; bin += group) {
    if (bin * series.bin_seconds > view.t1) break;
    const end = Math.min(series.bins, bin + group);
    draw(plot.x(bin * series.bin_seconds), plot.x(end * series.bin_seconds), bin, end);
  }
}

function sumOver(rows, bin, end, isOn) {
  let sum = 0;
  rows.forEach((row, i) => {
    if (!isOn(pictures.ranks[i])) return;
    for (let b = bin; b < end; b += 1) sum += row[b];
  });
  return sum;
}

const rankOn = (rank) => shown.ranks.get(rank);
const binAt = (seconds) => clamp(Math.floor(seconds / series.bin_seconds), 0, series.bins - 1);

// Lines of steps that break where there is nothing.
class StepChart extends Plot {
  constructor(holder, name, height) {
    super(holder, name, height);
    this.steps = [];
  }

  path(context, values, y) {
    context.beginPath();
    let open = false;
    for (const { x0, x1, value } of values) {
      if (value === null) {
        open = false;
        continue;
      }
      if (open) context.lineTo(x0, y(value));
      else context.moveTo(x0, y(value));
      context.lineTo(x1, y(value));
      open = true;
    }
    context.stroke();
  }
}

class HitChart extends StepChart {
  constructor(holder) {
    super(holder, "Hit rate over time", 150);
  }

  draw(context, look) {
    const y = (share) => TOP + 6 + (1 - share) * (this.plotHeight - 12);
    this.timeAxis(context, look);
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((at) => ({ at, label: `${at * 100}` }));
    this.leftAxis(context, look, ticks, y, "hits [%]");
    const values = [];
    eachStep(this, 3, (x0, x1, bin, end) => {
      const of = sumOver(series.accesses, bin, end, rankOn);
      const missed = sumOver(series.misses, bin, end, rankOn);
      values.push({ x0, x1, value: of ? Math.max(0, 1 - missed / of) : null });
    });
    this.clip(context, () => {
      context.strokeStyle = look.accent;
      context.lineWidth = 1.6;
      this.path(context, values, y);
    });
  }

  tell(x) {
    const bin = binAt(this.seconds(x));
    const of = sumOver(series.accesses, bin, bin + 1, rankOn);
    const missed = sumOver(series.misses, bin, bin + 1, rankOn);
    const hits = of ? `${percentText(Math.max(0, 1 - missed / of))} hits` : "no access";
    return [hits, `${plural(missed, "miss").replace("misss", "misses")} of ${plural(of, "access").replace("accesss", "accesses")}`,
      `in ${secondsText(series.bin_seconds)} from ${secondsText(bin * series.bin_seconds)}`];
  }
}

const SOURCES = {
  ranks: ["ranks' reading", "kernel", [], "by the ranks: misses and the kernel's readahead"],
  service: ["our service", "warm", [8, 3], "by our service"],
  others: ["others", "other", [2, 3], "by other processes"],
  disks: ["block devices", "muted", [10, 3, 2, 3], "from block devices"],
};

class BytesChart extends StepChart {
  constructor(holder) {
    super(holder, "Bytes per second into the page cache over time", 170);
    this.names = Object.keys(SOURCES).filter((name) => series.bytes_per_second[name]);
  }

  draw(context, look) {
    const lines = this.names.map((name) => {
      const row = series.bytes_per_second[name], values = [];
      eachStep(this, 3, (x0, x1, bin, end) => {
        let sum = 0;
        for (let b = bin; b < end; b += 1) sum += row[b];
        values.push({ x0, x1, value: sum / (end - bin) });
      });
      return { name, values };
    });
    const most = Math.max(1, ...lines.flatMap((l) => l.values.map((v) => v.value))) * 1.06;
    const power = Math.min(4, Math.max(0, Math.floor(Math.log10(most) / 3)));
    const unit = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"][power];
    const y = (value) => TOP + (1 - value / most) * this.plotHeight;
    this.timeAxis(context, look);
    const label = (v) => digits3(v / 1000 ** power);
    this.leftAxis(context, look, plainTicks(0, most, 4, label), y, `into the cache [${unit}]`);
    const labels = [];
    this.clip(context, () => {
      for (const { name, values } of lines) {
        context.strokeStyle = look[SOURCES[name][1]];
        context.lineWidth = 2;
        context.setLineDash(SOURCES[name][2]);
        this.path(context, values, y);
        context.setLineDash([]);
      }
    });
    // Beside the lines, spread apart, with a piece of each line: no colour is needed to read them.
    lines.forEach(({ name }, i) => labels.push({ name, y: TOP + 14 + i * 34 }));
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (const { name, y: at } of labels) {
      const x0 = LEFT + this.plotWidth + 8;
      context.strokeStyle = look[SOURCES[name][1]];
      context.lineWidth = 2;
      context.setLineDash(SOURCES[name][2]);
      context.beginPath();
      context.moveTo(x0, at - 8);
      context.lineTo(x0 + 34, at - 8);
      context.stroke();
      context.setLineDash([]);
      context.fillStyle = look.text;
      context.fillText(SOURCES[name][0], x0, at + 5, RIGHT - 12);
    }
  }

  tell(x) {
    const bin = binAt(this.seconds(x));
    const lines = this.names.map((name) => (
      `${rateText(series.bytes_per_second[name][bin])} ${SOURCES[name][3]}`));
    return [`at ${secondsText(bin * series.bin_seconds)}`, ...lines];
  }
}

// A row per rank: 26 pixels each, up to 16 of them; then narrower ones, never below 4.
function rowsHeight(rows) {
  return TOP + BOTTOM + Math.max(Math.min(rows * 26, 416), rows * 4, 44);
}

class StallChart extends Plot {
  constructor(holder) {
    super(holder, "Stall by rank over time", rowsHeight(pictures.ranks.length));
  }

  draw(context, look) {
    const ramp = Array.from({ length: 65 }, (_, i) => `rgb(${rampColour(look.heat, i / 64)})`);
    const each = this.plotHeight / pictures.ranks.length;
    this.clip(context, () => {
      pictures.ranks.forEach((rank, row) => {
        const y = TOP + row * each;
        if (!rankOn(rank)) return;
        eachStep(this, 2, (x0, x1, bin, end) => {
          let sum = 0;
          for (let b = bin; b < end; b += 1) sum += series.stall_share[row][b];
          context.fillStyle = ramp[Math.round(clamp(sum / (end - bin), 0, 1) * 64)];
          const left = Math.floor(x0);
          context.fillRect(left, y, Math.ceil(x1) - left, each - (each > 6 ? 1 : 0));
        });
      });
    });
    this.timeAxis(context, look, false);
    rankLabels(this, context, look, each);
    this.scale(context, look, ramp);
  }

  scale(context, look, ramp) {
    const x = LEFT + this.plotWidth + 10, height = Math.min(90, this.plotHeight - 4);
    for (let i = 0; i < height; i += 1) {
      context.fillStyle = ramp[Math.round((1 - i / (height - 1)) * 64)];
      context.fillRect(x, TOP + 2 + i, 12, 1.5);
    }
    context.strokeStyle = look.frame;
    context.strokeRect(x, TOP + 2, 12, height);
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = look.muted;
    context.fillText("100 %", x + 17, TOP + 8);
    if (height > 60) context.fillText("50", x + 17, TOP + 2 + height / 2);
    context.fillText("0", x + 17, TOP + height - 3);
  }

  tell(x, y) {
    const row = Math.floor(((y - TOP) / this.plotHeight) * pictures.ranks.length);
    const rank = pictures.ranks[row];
    if (rank === undefined || !rankOn(rank)) return null;
    const bin = binAt(this.seconds(x));
    return [`rank ${rank}: ${percentText(series.stall_share[row][bin])} stalled`,
      `of ${secondsText(series.bin_seconds)} from ${secondsText(bin * series.bin_seconds)}`];
  }
}

function rankLabels(plot, context, look, each) {
  const every = Math.ceil(13 / each);
  const ticks = pictures.ranks
    .map((rank, row) => ({ at: row, label: String(rank) }))
    .filter((_, row) => row % every === 0);
  plot.leftAxis(context, { ...look, line: "#00000000" }, ticks, (row) => TOP + (row + 0.5) * each,
    "rank");
}
