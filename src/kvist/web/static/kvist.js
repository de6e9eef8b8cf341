// Draws the charts, and keeps them up to date. All else on the page is text that the server writes.
"use strict";

const PERIOD_MS = 5000;
const HEIGHT_PX = 210;
const WIDTH_S = 60;  // What a chart covers at least.
const KIB = 1024;
const dark = matchMedia("(prefers-color-scheme: dark)");
let history = null;
let charts = [];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const count = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const share = (value) => `${(100 * value).toFixed(1)} %`;
const clock = (seconds) => new Date(1000 * seconds).toISOString().slice(11, 19);

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.max(Math.floor(Math.log2(Math.max(value, 1)) / 10), 0), units.length - 1);
  return `${count(value / KIB ** power)} ${units[power]}`;
}

// Steps of an axis of bytes: powers of two.
const byteSteps = Array.from({ length: 50 }, (_, power) => 2 ** power);

const line = (label, write, name, scale, data, more = {}) => ({
  data, options: { label, scale, stroke: colour(name), width: 1.5, points: { size: 4 }, value: write, ...more },
});
const written = (write) => (_, value) => (value === null || value === undefined ? "–" : write(value));

// Where something was found, one above another. The highest is drawn first, so that the others cover it.
function hits() {
  const add = (a, b) => a.map((value, at) => (value === null || b[at] === null ? null : value + b[at]));
  const found = add(history.pool, history.tier);
  const own = (chart, _, number, at) => written((value) => `${count(value)}/s`)(chart, chart.told.lines[number - 1].own[at]);
  const area = (label, name, alone, data) => ({ ...line(label, own, name, "y", data, { fill: colour(name), width: 0 }), own: alone });
  return {
    id: "hits-chart",
    lines: [
      area("missed", "missed", history.missed, add(found, history.missed)),
      area("tier", "tier", history.tier, found),
      area("pool", "pool", history.pool, history.pool),
      line("hit rate of a minute", written(share), "rate", "share", history.hit_rate, { width: 2 }),
    ],
    axes: [{ scale: "y", write: (value) => count(value) }, { scale: "share", write: (value) => `${Math.round(100 * value)} %`, side: 1 }],
  };
}

function flows() {
  const peak = Math.max(1, ...[history.loads, history.stores, history.tier_reads, history.tier_writes].flat());
  const ceiling = Math.max(0, ...history.ceiling);
  const rate = written((value) => `${bytes(value)}/s`);
  const hasTiers = Object.keys(history.fills).length > 1;
  return {
    id: "flows-chart",
    lines: [
      line("loads", rate, "loads", "y", history.loads),
      line("stores", rate, "stores", "y", history.stores),
      ...(hasTiers ? [
        line("tier reads", rate, "tier-reads", "y", history.tier_reads),
        line("tier writes", rate, "tier-writes", "y", history.tier_writes),
      ] : []),
      line("memory's ceiling", rate, "ceiling", "y", history.ceiling, { dash: [6, 4] }),
    ],
    // A ceiling far above what happens would press the lines flat: then it is told by the legend alone.
    top: peak > ceiling / 10 ? 1.05 * Math.max(peak, ceiling) : 1.2 * peak,
    axes: [{ scale: "y", write: (value) => `${bytes(value)}/s`, incrs: byteSteps }],
  };
}

function fills() {
  const names = ["pool", "tier", "tier-reads", "tier-writes"];
  return {
    id: "fills-chart",
    lines: [
      ...Object.entries(history.fills).map(([name, data], at) => line(name, written(share), names[at % names.length], "share", data)),
      line("evicted", written((value) => `${count(value)}/s`), "rate", "y", history.evicted),
    ],
    axes: [{ scale: "share", write: (value) => `${Math.round(100 * value)} %` }, { scale: "y", write: (value) => `${count(value)}/s`, side: 1 }],
  };
}

function draw(told) {
  const { id, lines, axes } = told;
  const place = document.getElementById(id);
  const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
  const options = {
    width: place.clientWidth,
    height: HEIGHT_PX,
    tzDate: (seconds) => uPlot.tzDate(new Date(1000 * seconds), "Etc/UTC"),
    scales: {
      x: { range: () => [Math.min(history.at[0], history.at.at(-1) - WIDTH_S), history.at.at(-1)] },
      y: { range: (chart, _, highest) => [0, chart.told.top ?? Math.max(1, 1.1 * (highest ?? 0))] },
      share: { range: [0, 1] },
    },
    cursor: { points: { size: 6 }, drag: { x: false, y: false } },
    series: [{ label: "UTC", value: (_, at) => (at === null ? "–" : clock(at)) }, ...lines.map((one) => one.options)],
    axes: [
      { ...axis, values: (_, splits, __, ___, step) => splits.map((at) => clock(at).slice(0, step < 60 ? 8 : 5)), space: 70, size: 28 },
      ...axes.map(({ write, ...more }, at) => ({
        ...axis, size: 62, space: 28, ...more, grid: { ...axis.grid, show: at === 0 }, values: (_, splits) => splits.map(write),
      })),
    ],
    hooks: { setCursor: [showNewest] },
  };
  const chart = new uPlot(options, null, place);
  show(chart, told);
  return chart;
}

function show(chart, told) {
  chart.told = told;
  chart.setData([history.at, ...told.lines.map((one) => one.data)]);
  showNewest(chart);
}

// While nothing is pointed at, the legend says what is now.
function showNewest(chart) {
  if (chart.cursor.idx === null || chart.cursor.idx === undefined) {
    chart.setLegend({ idx: history.at.length - 1 }, false);
  }
}

function drawAll() {
  charts.forEach((chart) => chart.destroy());
  charts = [];
  if (history && history.at.length) {
    charts = [hits(), flows(), fills()].map(draw);
  }
}

// Charts stay, and with them what is pointed at, unless there are other lines than before.
function update() {
  const told = [hits(), flows(), fills()];
  const labels = (all) => JSON.stringify(all.map(({ lines }) => lines.map((one) => one.options.label)));
  if (charts.length && history.at.length && labels(told) === labels(charts.map((chart) => chart.told))) {
    charts.forEach((chart, at) => show(chart, told[at]));
  } else {
    drawAll();
  }
}

async function refresh() {
  if (document.hidden) {
    return;
  }
  const lost = document.getElementById("lost");
  try {
    const reply = await fetch("history.json");
    history = reply.ok ? await reply.json() : history;
    lost.hidden = reply.ok;
  } catch {
    lost.hidden = false;
    return;
  }
  if (history) {
    update();
  }
}

dark.addEventListener("change", drawAll);
addEventListener("resize", () => charts.forEach((chart) => chart.setSize({ width: chart.root.parentElement.clientWidth, height: HEIGHT_PX })));
document.addEventListener("visibilitychange", refresh);
setInterval(refresh, PERIOD_MS);
refresh();
