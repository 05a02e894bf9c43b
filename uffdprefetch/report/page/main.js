// SPDX-License-Identifier: Apache-2.0
// The page: what stands where, the switches, and what a test may ask.

// ---- text and tables ---------------------------------------------------------------------------

function fact(name, value) {
  return value === null || value === undefined || value === ""
    ? null : el("div", { class: "fact" }, el("span", {}, name), value);
}

function header() {
  const { trace = {} } = report;
  const command = (trace.command ?? []).join(" ");
  $("command").textContent = head.title || trace.path || "trace";
  if (command !== head.title) $("full").append(el("code", {}, command));
  $("facts").append(...[
    fact("ranks", String(pictures.ranks.length)),
    fact("ran", secondsText(trace.seconds ?? pictures.seconds)),
    fact("on", trace.host),
    fact("from", trace.started_utc),
    fact("seen by", { bpf: "the kernel (BPF)", service: "our service", "bpf+service": "the kernel (BPF) and our service" }[trace.source] ?? trace.source),
    fact("events", trace.events == null ? null : countText(trace.events)
      + (trace.lost_events ? `, ${countText(trace.lost_events)} lost` : ", none lost")),
    fact("recording cost", trace.recorder_cpu_seconds == null ? null
      : `${secondsText(trace.recorder_cpu_seconds)} of CPU`),
  ].filter(Boolean));
  const { lacks } = head;
  $("missing").hidden = !lacks.length;
  $("missing-list").append(...lacks.map((lack) => lackItem(lack)));
}

function lackItem({ what, why, lift }) {
  return el("li", {}, el("b", {}, what), why ? `: ${why}` : "",
    lift ? [". ", el("span", { class: "lift" }, "To have it: ", el("code", {}, lift))] : "");
}

function findings() {
  const list = report.findings ?? [];
  $("findings-none").hidden = list.length > 0;
  $("findings").hidden = !list.length;
  $("findings").querySelector("tbody").append(...list.map((one) => el("tr", {},
    el("td", {}, el("span", { class: `severity ${one.severity}` }, one.severity)),
    el("td", {}, el("b", {}, one.title), el("div", { class: "detail" }, one.detail ?? "")),
    el("td", { class: "cost" }, one.cost_text ?? ""),
    el("td", {}, withCode(one.remedy ?? ""),
      el("div", { class: "detail" }, one.source ? `from ${one.source}` : "")))));
}

// `What stands in backquotes` is code.
function withCode(text) {
  return text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));
}

function figure(key, extra = {}) {
  const caption = { ...head.captions[key], ...extra };
  const status = el("span", { class: "status" });
  const body = el("div");
  const node = el("figure", { id: extra.id ?? `figure-${key}` },
    el("h2", {}, caption.title, status), body,
    el("figcaption", {}, caption.text,
      caption.lacks?.length ? el("ul", { class: "lacks" }, caption.lacks.map(lackItem)) : null));
  $("figures").append(node);
  return { body, status, node };
}

function emptyFigure(key) {
  const { body } = figure(key);
  body.append(el("p", { class: "nothing" }, head.captions[key].empty));
}

const cellClass = (text) => (text.length < 18 ? "plain" : text.length < 32 ? null : "long");

function table(id, heads, rows) {
  if (!rows.length) return;
  $(id).hidden = false;
  $(id).querySelector("table").append(
    el("thead", {}, el("tr", {}, heads.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => (
      // What is short stays in one line; a path may break.
      el("td", { class: cellClass(cell ?? "n/a") }, cell ?? "n/a")))))));
}

function patternText(pattern = {}) {
  let text = pattern.name ?? "unknown";
  if (pattern.stride_records) text += `, every ${ordinal(pattern.stride_records)} record`;
  if (pattern.stride_bytes) text += ` (${bytesText(pattern.stride_bytes)} on)`;
  return text;
}

// A fault may map more than what is touched: then only bounds are known.
function touchedText({ touched_pages: most, touched_pages_least: least }) {
  const text = (pages) => bytesText(pages * pictures.page_bytes);
  if (most == null) return "n/a";
  return least == null || least === most ? text(most) : `${text(least)} to ${text(most)}`;
}

function ordinal(n) {
  const last = Math.floor(n / 10) % 10 === 1 ? "th" : ["th", "st", "nd", "rd"][n % 10] ?? "th";
  return `${n}${last}`;
}

/* A fault maps more than is touched: what of it was not used is between two bounds. */
function uselessText(file) {
  const least = bytesText(file.useless_bytes), most = file.useless_most_bytes;
  return most > file.useless_bytes ? `${least} to ${bytesText(most)}` : least;
}

function tables() {
  const names = new Map((report.files ?? []).map((file) => [file.id, lastPart(file.path ?? "?")]));
  table("readers", ["rank", "file", "pattern", "fits", "major / faults", "touched", "epochs", "stall"],
    (report.readers ?? []).map((r) => [
      String(r.rank), names.get(r.file) ?? String(r.file), patternText(r.pattern),
      percentText(r.pattern?.share),
      r.faults ? [r.faults.major, r.faults.total]
        .map((count) => count == null ? "n/a" : countText(count)).join(" / ") : "n/a",
      touchedText(r),
      r.epochs ? r.epochs.length + (r.epochs_at_least ? "+" : "") : "n/a",
      secondsText(r.stall_seconds) + (r.stall_share != null ? ` (${percentText(r.stall_share)})` : ""),
    ]));
  table("files", ["file", "size", "on", "touched", "brought in", "more than once", "never used", "readahead"],
    (report.files ?? []).map((f) => [
      f.path, bytesText(f.size_bytes), f.file_system || "n/a",
      touchedText(f),
      f.pool && !f.fill_bytes ? "in our pool" : bytesText(f.fill_bytes),
      f.pool && !f.fill_bytes ? "n/a" : bytesText(f.refilled_bytes),
      f.useless_bytes == null || (f.pool && !f.fill_bytes) ? "n/a" : uselessText(f),
      bytesText(f.read_ahead_bytes),
    ]));
}

// ---- switches ----------------------------------------------------------------------------------

function chip(name, mark, colour, isOn, toggle, title = null) {
  const button = el("button", {
    type: "button", class: "chip", "aria-pressed": String(isOn), title,
    onclick: () => toggle(button.getAttribute("aria-pressed") !== "true"),
  }, el("span", { class: "sign", style: { color: colour } }, mark), name);
  return button;
}

const chips = { ranks: new Map(), kinds: new Map() };

function setRank(rank, isOn) {
  shown.ranks.set(rank, isOn);
  chips.ranks.get(rank)?.setAttribute("aria-pressed", String(isOn));
  redrawAll();
}

function setKind(kind, isOn) {
  shown.kinds.set(kind, isOn);
  redrawAll();
}

// Switches of the access map: the kinds that are drawn alike go together.
const LAYER_CHIPS = [
  ["accesses", ["around", "fault", "touch", "pool", "seen", "read"], "●", "text", "first touches of mapped pages, and read(2)"],
  ["misses", ["major", "missed"], "✕", "miss", "faults that had to wait for the storage (major), and touches that the pool had to read for"],
  ["late", ["late"], "+", "late", "the page was on its way and was waited for"],
  ["our prefetching", ["warm"], "▨", "warm", "what our service read ahead, until its first use"],
  ["kernel readahead", ["kernel"], "▢", "kernel", "what the kernel read beyond the page that was missed, until its first use"],
  ["read by others", ["other"], "░", "other", "what other processes brought into the cache"],
  ["evicted", ["evict", "punch"], "⋰", "evict", "what left the page cache, or our service's pool"],
];

function toolbar() {
  $("rank-chips").append(...pictures.ranks.map((rank, i) => {
    const one = chip(String(rank), SHAPE_SIGNS[i % SHAPE_SIGNS.length],
      `var(--rank-${i % RANK_COLOURS})`, true, (isOn) => setRank(rank, isOn), rankTitle(rank));
    chips.ranks.set(rank, one);
    return one;
  }));
  $("ranks-all").addEventListener("click", () => pictures.ranks.forEach((r) => setRank(r, true)));
  $("ranks-none").addEventListener("click", () => pictures.ranks.forEach((r) => setRank(r, false)));
  const present = new Set(pictures.kinds_present);
  for (const [name, kinds, mark, colour, title] of LAYER_CHIPS) {
    if (!kinds.some((kind) => present.has(kind))) continue;
    const isOn = kinds.some((kind) => shown.kinds.get(kind));
    const one = chip(name, mark, `var(--${colour})`, isOn, (on) => {
      one.setAttribute("aria-pressed", String(on));
      kinds.forEach((kind) => setKind(kind, on));
    }, title);
    chips.kinds.set(kinds[0], one);
    $("layer-chips").append(one);
  }
  $("reset").addEventListener("click", resetView);
  $("back").addEventListener("click", back);
}

function rankTitle(rank) {
  const known = (report.ranks ?? []).find((entry) => entry.rank === rank);
  if (!known) return `rank ${rank}`;
  return `rank ${rank}: ${[...new Set(known.commands ?? [])].join(", ")} (pid ${(known.pids ?? []).join(", ")})`;
}

// ---- all together ------------------------------------------------------------------------------

const maps = [];

function build() {
  header();
  findings();
  toolbar();
  for (const file of pictures.files) {
    const { body, status } = figure("map", {
      id: `map-${file.id}`,
      title: `Access map of ${file.path}`,
      ...head.map_captions[file.id],
    });
    maps.push(new AccessMap(body, file, status));
  }
  if (!maps.length) emptyFigure("map");
  if (series.accesses && series.misses) new HitChart(figure("hits").body);
  else emptyFigure("hits");
  if (Object.keys(series.bytes_per_second).length) new BytesChart(figure("bytes").body);
  else emptyFigure("bytes");
  if (series.stall_share) new StallChart(figure("stall").body);
  else emptyFigure("stall");
  if (pictures.epochs.length) new EpochChart(figure("epochs").body);
  if (pictures.calls.length) new CallChart(figure("calls").body);
  else emptyFigure("calls");
  if (pictures.iterations.length) new IterationChart(figure("iterations").body);
  else emptyFigure("iterations");
  tables();
}

// What a test drives and reads; times in seconds, offsets in bytes.
window.uffdprefetch = {
  get view() { return { t0: view.t0, t1: view.t1, maps: maps.map(({ file, o0, o1 }) => ({ file: file.id, o0, o1 })) }; },
  get ranks() { return [...shown.ranks].map(([rank, on]) => ({ rank, on })); },
  get drawn() { return maps.map(({ file, drawn }) => ({ file: file.id, ...drawn })); },
  get tip() { return $("tip").hidden ? null : $("tip").innerText; },
  firstPictureMs: null,
  setRank,
  setKind,
  reset: resetView,
  zoomTo({ t0 = view.t0, t1 = view.t1, o0 = null, o1 = null, map = 0 }) {
    remember();
    if (o0 !== null) maps[map].setOffsets(o0, o1);
    setTime(t0, t1);
    return this.idle();
  },
  // Where a time and offset is drawn, relative to the map's canvas.
  place(seconds, offset, map = 0) { return [maps[map].x(seconds), maps[map].y(offset)]; },
  // Resolved once everything that is wanted is unpacked and drawn.
  async idle() {
    const tick = () => new Promise((done) => { setTimeout(done, 20); });
    do await tick(); while (frame || settle || allWindows.busy || redraws.size);
    return true;
  },
};

async function start() {
  cells = await loadCells();
  build();
  allWindows.changed = () => maps.forEach(redraw);
  requestAnimationFrame(() => requestAnimationFrame(() => {
    window.uffdprefetch.firstPictureMs = performance.now();
    document.documentElement.dataset.drawn = "yes";
  }));
}

for (const query of ["(prefers-color-scheme: dark)", "(resolution: 1dppx)"]) {
  matchMedia(query).addEventListener("change", redrawAll);
}
// On paper the light colours, whatever the screen has.
window.addEventListener("beforeprint", () => {
  document.documentElement.classList.add("paper");
  plots.forEach((plot) => plot.render());
});
window.addEventListener("afterprint", () => {
  document.documentElement.classList.remove("paper");
  redrawAll();
});
start();
