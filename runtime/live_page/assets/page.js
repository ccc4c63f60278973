// The live page of a run: reads live/events and shows the last state and the charts.
// It only reads. All texts are inserted as text, never as HTML.
"use strict";

(() => {
  const MAX_POINTS = 4000; // then all points are requested again, of which older ones are merged
  const POLL_SECONDS = 5; // while all streams are in use
  const SILENT_SECONDS = 15; // without an event, the connection counts as lost
  const RANGES = [["5 min", 300], ["1 h", 3600], ["6 h", 21600], ["all", Infinity]];
  const GOOD = ["training", "completed"];
  const NEUTRAL = ["starting", "interrupted", "ended"];
  const STACK = ["data", "forward", "backward", "optimizer", "generate", "eval", "checkpoint",
    "other"];
  const NOT_TRAINING = ["eval", "checkpoint"]; // their shares are of wall time
  const CAUSE_TEXT = {
    imbalance: "another rank was late, or no transfer",
    latency: "fixed cost of each call",
    redundancy: "more bytes than the ZeRO stage needs",
    bandwidth: "the link was busy",
  };
  // The path of the page with a closing slash, also behind a proxy that leaves it out.
  const base = location.pathname.replace(/\/?$/, "/");
  const page = { state: null, points: null, older: null, next: null, range: 3600, dirty: false,
    readings: 0 };
  const byId = (id) => document.getElementById(id);

  // ---- Numbers as text

  const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
  const fixed = (value, digits) => (known(value) ? value.toFixed(digits) : "-");

  function number(value) {
    if (!known(value)) return "-";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return value.toLocaleString("en", { maximumFractionDigits: size < 1 ? 4 : size < 100 ? 2 : 0 });
  }

  function percent(value) {
    if (!known(value)) return "-";
    if (value > 0 && value < 0.0005) return "< 0.1 %";
    return `${(100 * value).toFixed(value < 0.0995 && value > 0 ? 1 : 0)} %`;
  }

  function bytes(value) {
    if (!known(value)) return "-";
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
    return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
  }

  function seconds(value) {
    if (!known(value)) return "-";
    if (value === 0) return "0 s";
    if (value >= 172800) return `${(value / 86400).toFixed(1)} d`;
    if (value >= 5400) return `${(value / 3600).toFixed(1)} h`;
    if (value >= 120) return `${(value / 60).toFixed(1)} min`;
    return value >= 1 ? `${value.toFixed(1)} s` : `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms`;
  }

  // ---- Elements

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  /** An element whose text is a figure; data-key and data-value have its name and exact value. */
  function figure(name, text, key, value, className) {
    const made = element(name, text, className);
    made.dataset.key = key;
    made.dataset.value = known(value) ? String(value) : "";
    return made;
  }

  function row(...cells) {
    const made = element("tr");
    made.append(...cells.map((cell) => (cell instanceof Node ? cell : element("td", cell))));
    return made;
  }

  function head(...names) {
    const made = element("tr");
    made.append(...names.map((name) => element("th", name)));
    return made;
  }

  function swatch(name, color) {
    const cell = element("td");
    const mark = element("span", "", "swatch");
    mark.style.background = `var(--${color})`;
    cell.append(mark, name);
    return cell;
  }

  function pair(name, text, key, value) {
    return row(name, figure("td", text, key, value));
  }

  // ---- The state

  function show(state) {
    const { run, training, communication } = state;
    byId("content").hidden = false;
    byId("login").hidden = true;
    byId("run").textContent = run.run_id ?? "zerowatch";
    document.title = `${run.run_id ?? "zerowatch"}: ${state.status}`;
    const badge = byId("status");
    badge.textContent = state.status.replaceAll("_", " ");
    badge.className = `badge ${GOOD.includes(state.status) ? "good"
      : NEUTRAL.includes(state.status) ? "" : "bad"}`;
    showProblems(state.problems);
    byId("cards").replaceChildren(...cards(state));
    byId("phases").replaceChildren(...phases(state.phases));
    byId("causes").replaceChildren(...causes(communication));
    byId("communication").replaceChildren(
      pair("time of all collectives", seconds(communication.seconds), "communication.seconds",
        communication.seconds),
      pair("sent by this rank", bytes(communication.wire_bytes), "communication.wire_bytes",
        communication.wire_bytes),
      pair("volume, over that of the ZeRO stage", number(communication.volume_ratio),
        "communication.volume_ratio", communication.volume_ratio),
      pair("recorded collectives", percent(communication.coverage), "communication.coverage",
        communication.coverage),
    );
    byId("memory").replaceChildren(...state.memory.map((each) => device(each, state.devices)));
    byId("tuner").replaceChildren(...tuner(state.tuner));
    showRanks(state.ranks);
    byId("facts").replaceChildren(...facts(state));
    const { monitoring } = state;
    byId("monitoring").replaceChildren(
      pair("time of monitoring", seconds(monitoring.seconds), "monitoring.seconds",
        monitoring.seconds),
      pair("lost records", number(monitoring.dropped), "monitoring.dropped", monitoring.dropped),
      pair("failed hooks", number(monitoring.failures), "monitoring.failures",
        monitoring.failures),
    );
    byId("ranges").querySelector("span").textContent =
      known(training.step) ? `step ${training.step}` : "";
  }

  /** Show the problems. Only what has changed is replaced: a link must stay to be clicked. */
  function showProblems(problems) {
    const shown = JSON.stringify(problems);
    if (shown === page.problems) return;
    page.problems = shown;
    byId("problems").replaceChildren(...problems.map(problem));
  }

  function problem(each) {
    const item = element("li", undefined, each.severity);
    item.append(element("b", each.alert), each.text);
    if (!token()) { // a link cannot send one
      const link = element("a", "what to do");
      link.href = `${base}live/runbook?alert=${encodeURIComponent(each.alert)}`;
      link.target = "_blank";
      item.append(" ", link);
    }
    return item;
  }

  function cards({ training, communication, memory, ranks }) {
    const risk = [...memory.map((each) => each.risk), ...ranks.rows.map((each) => each.oom_risk)]
      .filter(known);
    const highest = risk.length ? Math.max(...risk) : null;
    const throughput = known(training.tokens_per_second)
      ? ["tokens per second", "training.tokens_per_second", training.tokens_per_second]
      : ["samples per second", "training.samples_per_second", training.samples_per_second];
    return [
      card("steps", number(training.steps), "training.steps", training.steps,
        `${fixed(training.steps_per_second, 2)} per second`),
      card("step time, median", seconds(training.step_seconds["0.5"]), "training.step_seconds.0.5",
        training.step_seconds["0.5"], `99 %: ${seconds(training.step_seconds["0.99"])}`),
      card("loss", number(training.loss), "training.loss", training.loss,
        `gradient norm ${number(training.gradient_norm)}`),
      card(throughput[0], number(throughput[2]), throughput[1], throughput[2], "this rank"),
      card("exposed communication", percent(communication.exposed_ratio),
        "communication.exposed_ratio", communication.exposed_ratio,
        `whole run ${percent(communication.run_exposed_ratio)}`,
        communication.exposed_ratio > 0.2 ? "warning" : ""),
      card("risk of out of memory", percent(highest), "memory.risk", highest,
        ranks.rows.length > 1 ? "highest rank, next 50 steps" : "next 50 steps",
        highest > 0.8 ? "bad" : highest > 0.5 ? "warning" : ""),
      card("MFU", percent(training.mfu), "training.mfu", training.mfu,
        `learning rate ${number(training.learning_rate)}`),
    ];
  }

  function card(name, text, key, value, hint, className = "") {
    const made = element("div", undefined, `card ${className}`);
    made.append(element("div", name, "name"), figure("div", text, key, value, "value"),
      element("div", hint, "hint"));
    return made;
  }

  const share = (part, whole) => percent(whole > 0 ? part / whole : null);
  const total = (values) => Object.values(values ?? {}).reduce((sum, each) => sum + each, 0);

  /** Return the share of a phase: of training time, or of wall time if it is not training. */
  function phaseShare(phase, spent) {
    const excluded = NOT_TRAINING.includes(phase) ? []
      : NOT_TRAINING.map((each) => spent[each] ?? 0);
    return share(spent[phase], total(spent) - total(excluded));
  }

  function phases(state) {
    return [head("phase", "last minute", "run", "seconds"),
      ...Object.entries(state.seconds).map(([phase, spent]) => row(
        swatch(NOT_TRAINING.includes(phase) ? `${phase}, of wall time` : phase, phase),
        phaseShare(phase, state.recent_seconds), phaseShare(phase, state.seconds),
        figure("td", number(spent), `phases.${phase}`, spent)))];
  }

  function causes(state) {
    const all = total(state.causes);
    const recent = total(state.recent_causes);
    return [head("cause", "last minute", "run", "seconds"),
      ...Object.entries(state.causes).map(([cause, spent]) => {
        const name = swatch(cause, cause);
        name.title = CAUSE_TEXT[cause] ?? "";
        return row(name, share(state.recent_causes?.[cause], recent), share(spent, all),
          figure("td", number(spent), `causes.${cause}`, spent));
      }),
      row("exposed", percent(state.exposed_ratio), percent(state.run_exposed_ratio),
        figure("td", number(state.exposed_seconds), "communication.exposed_seconds",
          state.exposed_seconds))];
  }

  function device(each, readings) {
    const made = element("div", undefined, `device ${each.risk > 0.5 ? "bad" : ""}`);
    const title = element("b", each.device === "cpu" ? "host (this process)" : each.device);
    const risk = figure("span", ` risk ${percent(each.risk)}`, `memory.${each.device}.risk`,
      each.risk, "risk");
    const bar = element("div", undefined, "bar");
    const keys = element("div", undefined, "keys");
    const parts = { baseline: each.baseline, ...each.categories };
    for (const [name, size] of Object.entries(parts)) {
      if (!(size > 0)) continue;
      const color = `var(--${name})`;
      const part = element("i");
      part.style.background = color;
      part.style.width = `${(100 * size) / (each.limit || total(parts))}%`;
      part.title = `${name}: ${bytes(size)}`;
      const key = element("span");
      const mark = element("span", "", "swatch");
      mark.style.background = color;
      key.append(mark, `${name.replaceAll("_", " ")} `,
        figure("span", bytes(size), `memory.${each.device}.${name}`, size));
      bar.append(part);
      keys.append(key);
    }
    const text = element("p");
    text.append("peak ", figure("span", bytes(each.peak), `memory.${each.device}.peak`, each.peak),
      " of ", figure("span", bytes(each.limit), `memory.${each.device}.limit`, each.limit),
      ", next peak ", figure("span", bytes(each.predicted_peak),
        `memory.${each.device}.predicted_peak`, each.predicted_peak), "; in use ",
      figure("span", bytes(each.allocated), `memory.${each.device}.allocated`, each.allocated));
    made.append(title, risk, bar, keys, text);
    const reading = readings.find((one) => one.device === each.device);
    if (reading) {
      const parts = [`busy ${percent(reading.utilization)}`];
      if (known(reading.power)) parts.push(`${fixed(reading.power, 0)} W`);
      if (known(reading.temperature)) parts.push(`${fixed(reading.temperature, 0)} °C`);
      made.append(element("p", parts.join(", ")));
    }
    return made;
  }

  function tuner(state) {
    if (!state.state) return [element("p", "No tuner.", "note")];
    const table = element("table", undefined, "pairs");
    table.append(row("state", figure("td", state.state.replaceAll("_", " "), "tuner.state")));
    for (const [verdict, count] of Object.entries(state.decisions)) {
      table.append(pair(`changes ${verdict.replaceAll("_", " ")}`, number(count),
        `tuner.decisions.${verdict}`, count));
    }
    for (const [symptom, strength] of Object.entries(state.symptoms)) {
      table.append(pair(`symptom ${symptom.replaceAll("_", " ")}`, number(strength),
        `tuner.symptoms.${symptom}`, strength));
    }
    for (const [knob, value] of Object.entries(state.knobs)) {
      const gain = state.gains[knob];
      const proof = known(gain)
        ? ` (gain ${percent(gain)}, at least ${percent(state.gain_lower_bounds[knob])})` : "";
      table.append(pair(knob, number(value) + proof, `tuner.knobs.${knob}`, value));
    }
    return [table];
  }

  const RANK_FIGURES = {
    step_duration: ["step", seconds], exposed_comm: ["exposed", percent],
    comm_wait: ["waits", percent], data: ["data", percent], memory_peak: ["memory", percent],
    oom_risk: ["risk", percent], device_utilization: ["busy", percent],
    device_temperature: ["°C", number], mfu: ["MFU", percent],
    samples_per_second: ["samples/s", number],
  };

  function showRanks(state) {
    const names = state.figures.filter((name) => RANK_FIGURES[name]);
    byId("ranks").replaceChildren(
      head("rank", "node", ...names.map((name) => RANK_FIGURES[name][0]), "slow in"),
      ...state.rows.map((each) => {
        const slow = Object.entries(each.slow);
        return row(String(each.rank), each.node ?? "-",
          ...names.map((name) => figure("td", RANK_FIGURES[name][1](each[name]),
            `ranks.${each.rank}.${name}`, each[name],
            name === "oom_risk" && each[name] > 0.5 ? "bad" : "")),
          element("td", slow.map(([phase, score]) => `${phase} +${percent(score)}`).join(", "),
            slow.length ? "warning" : ""));
      }));
    const missing = known(state.world_size) ? state.world_size - state.known : 0;
    byId("ranks-note").textContent = [
      state.known > state.rows.length
        ? `${state.rows.length} of ${state.known} ranks: those that are slow, and those for which `
          + "the others wait longest." : "",
      missing > 0 ? `${missing} of ${state.world_size} ranks have not reported an address.` : "",
      names.length ? "Figures of the last minute, every five seconds." : "",
    ].filter(Boolean).join(" ");
  }

  function facts({ run, training, now }) {
    const lines = [
      ["ranks", run.world_size], ["ZeRO stage", run.zero_stage], ["backend", run.backend],
      ["accelerator", run.accelerator], ["torch", run.torch], ["DeepSpeed", run.deepspeed],
      ["zerowatch", run.version],
      ["running for", known(run.started_at) ? seconds(now - run.started_at) : "-"],
      ["last step", known(run.last_step_at) ? `${seconds(Math.max(0, now - run.last_step_at))} ago`
        : "-"],
      ["restarts", known(run.attempt) ? number(run.attempt) : "-"],
      ["checkpoints", known(training.last_checkpoint_at)
        ? `${number(training.checkpoints)}, the last ${seconds(now - training.last_checkpoint_at)} ago`
        : number(training.checkpoints)],
      ["skipped steps", number(training.skipped)],
      ["steps with a loss of nan or inf", number(training.nonfinite_losses)],
    ];
    return lines.filter(([, text]) => text !== undefined && text !== null)
      .map(([name, text]) => row(name, String(text)));
  }

  // ---- The points of the charts

  function mergePoints(given) {
    if (given.reset || !page.points) {
      page.points = given;
    } else {
      append(page.points, given, page.points.ended_at.length);
    }
    page.next = given.next;
    page.dirty = true;
  }

  /** Append columns to columns, which have a length; a column that one of them lacks gets nulls. */
  function append(to, from, length) {
    const added = from.ended_at.length;
    for (const [name, column] of Object.entries(from)) {
      if (Array.isArray(column)) {
        to[name] ??= new Array(length).fill(null);
        for (const value of column) to[name].push(value);
      } else if (column !== null && typeof column === "object") {
        append(to[name] ??= {}, { ...column, ended_at: from.ended_at }, length);
        delete to[name].ended_at;
      }
    }
    for (const [name, column] of Object.entries(to)) {
      if (Array.isArray(column) && !(name in from)) {
        for (let index = 0; index < added; index += 1) column.push(null);
      }
    }
  }

  /** The points of the chosen range, with those of the run log before them if all are wanted. */
  function visible() {
    const points = page.points;
    if (page.range === Infinity && page.older?.ended_at.length) {
      const all = structuredClone(page.older);
      append(all, points, all.ended_at.length);
      return all;
    }
    const last = points.ended_at.at(-1) ?? 0;
    const from = points.ended_at.findIndex((at) => at >= last - page.range);
    if (from <= 0) return points;
    const cut = (columns) => Object.fromEntries(Object.entries(columns).map(([name, column]) =>
      [name, Array.isArray(column) ? column.slice(from)
        : column !== null && typeof column === "object" ? cut(column) : column]));
    return cut(points);
  }

  // ---- The charts

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`)
    .trim() || "#888888";

  /** One chart: its title and a function from points to series {label, color, values, text}. */
  const CHARTS = [
    { title: "Loss", series: (points) => [
      { label: "loss", color: "forward", values: points.loss, text: number }] },
    { title: "Step time by phase", stacked: true, axis: seconds, series: (points) =>
      STACK.filter((phase) => points.phases[phase]).map((phase) => (
        { label: phase, color: phase, values: points.phases[phase], text: seconds })) },
    { title: "Exposed communication, share of training time", axis: percent, floor: 0,
      series: (points) => [{ label: "exposed", color: "imbalance", values: points.exposed_ratio,
        text: percent }] },
    { title: "Peak memory", axis: bytes, floor: 0, series: (points) =>
      Object.entries(points.peak_bytes).flatMap(([name, values], index) => [
        { label: name, color: ["forward", "backward", "data", "optimizer"][index % 4], values,
          text: bytes },
        ...limit(name, values)]) },
    { title: "Throughput of this rank", floor: 0, series: (points) => {
      const name = points.tokens_per_second.some(known) ? "tokens" : "samples";
      return [{ label: `${name} per second`, color: "checkpoint",
        values: points[`${name}_per_second`], text: number }];
    } },
  ];

  /** The limit of a device, unless the chart would then show nothing else. */
  function limit(name, values) {
    const size = page.state.memory.find((each) => each.device === name)?.limit;
    const highest = values.reduce((high, value) => Math.max(high, value ?? 0), 0);
    if (!known(size) || size > 4 * highest) return [];
    return [{ label: `${name} limit`, color: "bad", dash: [6, 4], text: bytes,
      values: values.map(() => size) }];
  }

  function stack(series) {
    const sums = new Array(series[0]?.values.length ?? 0).fill(0);
    return series.map((each) => each.values.map((value, index) => (sums[index] += value ?? 0)));
  }

  function draw() {
    if (!page.points || document.hidden) return;
    const points = visible();
    const boxes = byId("charts");
    CHARTS.forEach((chart, index) => {
      const series = chart.series(points);
      const names = series.map((each) => each.label).join();
      let box = boxes.children[index];
      if (!box) {
        box = element("div", undefined, "chart");
        box.append(element("h2", chart.title), element("div"));
        boxes.append(box);
        new ResizeObserver(() => chart.plot?.setSize(size(box))).observe(box);
      }
      chart.shown = series;
      // The sums are drawn from the highest to the lowest, each over the one before.
      const values = chart.stacked ? stack(series).reverse()
        : series.map((each) => each.values);
      if (chart.names !== names) {
        chart.plot?.destroy();
        chart.names = names;
        chart.plot = plot(chart, series, box);
      }
      chart.plot.setData([points.ended_at, ...values]);
    });
  }

  const BYTE_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);
  const size = (box) => ({ width: Math.max(200, box.clientWidth - 26), height: 190 });

  function plot(chart, series, box) {
    const order = chart.stacked ? [...series].reverse() : series;
    const axis = { stroke: color("muted"), grid: { stroke: color("line"), width: 1 },
      ticks: { stroke: color("line"), width: 1 } };
    const spread = (plotted, low, high) => {
      if (!known(low)) return [0, 1];
      if (chart.stacked || chart.floor === 0) return [0, high > 0 ? 1.08 * high : 1];
      const margin = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
      return [low - margin, high + margin];
    };
    return new uPlot({
      ...size(box),
      scales: { y: { range: spread } },
      axes: [axis, { ...axis, size: 64, incrs: chart.axis === bytes ? BYTE_STEPS : undefined,
        values: (plotted, ticks) => ticks.map((tick) => (chart.axis ?? number)(tick)) }],
      cursor: { sync: { key: "run" }, drag: { x: true, y: false } },
      series: [
        { value: (plotted, at) => {
          const shown = at ?? plotted.data[0].at(-1);
          return known(shown) ? new Date(1000 * shown).toLocaleTimeString() : "-";
        } },
        ...order.map((each) => ({
          label: each.label,
          stroke: color(each.color),
          fill: chart.stacked ? color(each.color) : undefined,
          width: chart.stacked ? 0 : 1.5,
          dash: each.dash,
          points: { show: false },
          spanGaps: false,
          value: (plotted, value, _, index) => {
            const now = chart.shown.find((one) => one.label === each.label);
            return each.text(index === null ? now?.values.at(-1) : now?.values[index]);
          },
        })),
      ],
    }, [[], ...order.map(() => [])], box.lastElementChild);
  }

  function redrawAll() {
    for (const chart of CHARTS) {
      chart.plot?.destroy();
      chart.plot = chart.names = undefined;
    }
    page.dirty = true;
    schedule();
  }

  let scheduled = false;
  function schedule() {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => {
      scheduled = false;
      if (page.dirty && !document.hidden) {
        page.dirty = false;
        draw();
      }
    });
  }

  // ---- Reading

  const token = () => sessionStorage.getItem("zerowatch-token");

  async function request(path, signal) {
    const secret = token();
    const headers = secret ? { Authorization: `Bearer ${secret}` } : {};
    return fetch(base + path, { headers, signal, cache: "no-store" });
  }

  function accept(event) {
    const isOtherRun = page.state !== null && page.state.run.run_id !== event.state.run.run_id;
    page.state = event.state;
    mergePoints(event.points);
    if (isOtherRun) forgetOlder();
    if (event.points.reset) wantOlder();
    if (!document.hidden) show(event.state);
    schedule();
  }

  function connection(text, isBad = false) {
    byId("connection").textContent = text;
    byId("connection").className = isBad ? "bad" : "";
  }

  const isFull = () => page.points !== null && page.points.ended_at.length > MAX_POINTS;
  const pause = (secondsLong) => new Promise((done) => { setTimeout(done, 1000 * secondsLong); });
  const hasEnded = () => page.state !== null
    && !["training", "starting", "hanging", "stalled"].includes(page.state.status);

  /** Read server-sent events until the stream ends. */
  async function readStream(response, controller) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const silence = setTimeout(() => controller.abort(), 1000 * SILENT_SECONDS);
      const { value, done } = await reader.read().finally(() => clearTimeout(silence));
      if (done) return;
      text += value;
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        const block = text.slice(0, end);
        text = text.slice(end + 2);
        if (block.startsWith("data: ")) accept(JSON.parse(block.slice(6)));
      }
      connection("live");
      if (isFull()) {
        controller.abort();
        return;
      }
    }
  }

  async function poll() {
    for (let count = 0; count < 6; count += 1) {
      const query = page.next === null || isFull() ? "" : `?since=${page.next}`;
      const response = await request(`live/state${query}`);
      if (!response.ok) return;
      accept(await response.json());
      connection(`updated every ${POLL_SECONDS} s: other pages use all streams`);
      await pause(POLL_SECONDS);
    }
  }

  async function logIn() {
    byId("content").hidden = true;
    byId("login").hidden = false;
    connection(token() ? "this token is refused" : "a token is required", true);
    await new Promise((done) => { byId("login").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem("zerowatch-token", byId("token").value.trim());
      done();
    }; });
    byId("login").hidden = true;
  }

  async function follow() {
    for (let delay = 1; ; delay = Math.min(15, 2 * delay)) {
      const controller = new AbortController();
      try {
        const response = await request("live/events", controller.signal);
        if (response.status === 401) {
          await logIn();
          delay = 0.5;
          continue;
        }
        if (response.status === 503) {
          await poll();
          delay = 0.5;
          continue;
        }
        if (!response.ok) throw new Error((await response.text()).trim());
        delay = 0.5;
        await readStream(response, controller);
      } catch (error) {
        page.next = null; // the next answer may be of another process, with other points
        if (page.state === null) connection(`${error.message}; trying again`, true);
      }
      if (hasEnded()) {
        connection("the run has ended; these are its last figures");
      } else if (page.state !== null) {
        connection("no connection; these are the last figures", true);
      }
      await pause(delay);
    }
  }

  function forgetOlder() {
    page.older = null;
    page.readings += 1; // the answer of a reading that has begun is of the run before
  }

  /** Read the steps before those in memory, if all are wanted. */
  function wantOlder() {
    if (page.range === Infinity) readOlder().catch(() => {});
  }

  async function readOlder() {
    page.readings += 1;
    const reading = page.readings;
    for (let count = 0; count < 60; count += 1) {
      const response = await request("live/older");
      if (!response.ok) return;
      const older = await response.json();
      if (reading !== page.readings) return;
      if (older.status === "ready") {
        page.older = older;
        page.dirty = true;
        schedule();
      }
      if (older.status !== "reading") return;
      await pause(1);
    }
  }

  // ---- Start

  const ranges = byId("ranges");
  for (const [name, length] of RANGES) {
    const button = element("button", name);
    button.setAttribute("aria-pressed", String(length === page.range));
    button.onclick = () => {
      page.range = length;
      for (const other of ranges.querySelectorAll("button")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      wantOlder();
      page.dirty = true;
      schedule();
    };
    ranges.append(button);
  }
  ranges.append(element("span"));
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && page.state) {
      show(page.state);
      page.dirty = true;
      schedule();
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  follow();
})();
