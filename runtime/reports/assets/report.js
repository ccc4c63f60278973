// Draws the charts of a report and sorts its tables. The data is in the element "charts".
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const digits = (value, count) => Number(value.toPrecision(count)).toString();
  const scaled = (value, steps) => {
    const [size, suffix] = steps.find(([size]) => Math.abs(value) >= size) || steps.at(-1);
    return digits(value / size, 3) + suffix;
  };
  const formats = {
    seconds: (v) => scaled(v, [[1, " s"], [1e-3, " ms"], [1e-6, " µs"]]),
    ratio: (v) => digits(100 * v, 3) + " %",
    per_second: (v) => scaled(v, [[1e9, " G"], [1e6, " M"], [1e3, " k"], [1, ""]]),
    celsius: (v) => digits(v, 3) + " °C",
    "": (v) => digits(v, 4),
  };
  const plots = new Map();

  function draw(chart) {
    const element = document.getElementById("chart-" + chart.name);
    if (!element) return;
    plots.get(chart.name)?.destroy();
    const raw = chart.curves.map((curve) => curve.values);
    const sums = new Array(chart.steps.length).fill(0);
    const shown = chart.is_stacked
      ? raw.map((values) => values.map((value, i) => (sums[i] += value || 0)))
      : raw;
    const format = formats[chart.unit];
    const text = (value) => (value == null ? "–" : value === 0 ? "0" : format(value));
    const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 },
      ticks: { stroke: color("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    const options = {
      width: element.clientWidth, height: 220, cursor: { sync: { key: "steps" }, y: false },
      scales: { x: { time: false }, y: chart.is_log ? { distr: 3 } : chart.unit === "ratio"
        || chart.unit === "seconds" || chart.unit === "per_second"
        ? { range: (u, low, high) => [Math.min(0, low || 0), high > 0 ? high * 1.08 : 1] } : {} },
      axes: [{ ...axis, label: "step", labelSize: 18, labelFont: axis.font, size: 34 },
        { ...axis, size: 64, values: (u, splits) => splits.map((v) => v == null ? "" : text(v)) }],
      series: [{ label: "step", value: (u, v) => (v == null ? "–" : Math.round(v)) },
        ...chart.curves.map((curve, i) => ({
          label: curve.name, stroke: color("--c" + curve.color),
          width: chart.is_stacked ? 1 : i ? 1 : 1.8, dash: !chart.is_stacked && i % 3 ? [4, 3] : [],
          fill: chart.is_stacked ? color("--c" + curve.color) + "b0" : undefined,
          points: { show: chart.steps.length < 3 }, spanGaps: true,
          value: (u, v, series, index) => (index == null ? "–" : text(raw[i][index])),
        }))],
      // The legend shows the last values until the pointer is over a chart.
      hooks: { ready: [(plot) => plot.setLegend({ idx: chart.steps.length - 1 })],
        setLegend: [(plot) => plot.legend.idx == null
          && plot.setLegend({ idx: chart.steps.length - 1 }, false)] },
      bands: chart.is_stacked ? raw.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : [],
    };
    plots.set(chart.name, new uPlot(options, [chart.steps, ...shown], element));
  }

  const drawAll = () => charts.forEach(draw);
  drawAll();
  dark.addEventListener("change", drawAll);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    for (const [name, plot] of plots) {
      const element = document.getElementById("chart-" + name);
      plot.setSize({ width: element.clientWidth, height: 220 });
    }
  });

  for (const table of document.querySelectorAll("table.sortable")) {
    table.querySelectorAll("th").forEach((head, column) => {
      const button = document.createElement("button");
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        table.querySelectorAll("th").forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
        const body = table.tBodies[0];
        const rows = [...body.rows].sort((a, b) => {
          const [x, y] = [key(a), key(b)];
          const order = x === "" || y === "" ? (x === "") - (y === "") || 0
            : isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
          return x === "" || y === "" ? order : down ? -order : order;
        });
        body.replaceChildren(...rows);
      });
    });
  }
})();
