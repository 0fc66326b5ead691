// Draws the charts of a report with uPlot. charts.py describes the page's data: `data.tables` are tables of columns,
// and `data.charts` have lines, each of which is a column of a table.
//
// A chart without an axis of its own is drawn over the horizontal axis that the reader chooses. A series is what uPlot
// draws for a line. The readout is the text below a chart: the values at the pointer. `u` is uPlot's name for a plot.
// `ruler` is a canvas that measures the width of texts.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const chartsOverChosenAxis = data.charts.filter((chart) => !chart.axis);
  const hasTime = data.tables.every((table) => table.time && table.time.some((seconds) => seconds > 0));
  const saved = loadChoices();
  // The reader's choices: the horizontal axis; the share of a run that a median is over, in %; and by the name of a
  // chart, whether its vertical axis is logarithmic.
  const state = { axis: saved.axis || "tokens", smoothing: saved.smoothing ?? 2.5, log: saved.log || {} };
  const plots = new Map(); // the uPlot objects by the names of their charts
  const MAX_READ_OUT = 6; // with more lines than this, only the line under the pointer is read out
  const FONT = "12px system-ui, -apple-system, 'Segoe UI', sans-serif";
  const DOT_SIZES = { points: 6, dots: 5, star: 11 }; // px, by the line's style
  const LINEAR = 1, LOG = 3; // uPlot's numbers for the kinds of a scale
  const SHADES = ["--accent", "--second", "--third", "--fourth"];

  // A page that reloads itself keeps the reader's choices, unless the browser has no storage for pages of files.
  function loadChoices() {
    try {
      return JSON.parse(sessionStorage.getItem(location.pathname)) || {};
    } catch {
      return {};
    }
  }

  function saveChoices() {
    try {
      sessionStorage.setItem(location.pathname, JSON.stringify(state));
    } catch {
      // Without a storage, the choices are lost when the page reloads.
    }
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // ---- numbers as a person reads them ----

  function digits(value) {
    if (value === 0) return "0";
    return String(Number(value.toPrecision(Math.abs(value) >= 100 ? 4 : 3)));
  }

  function withPrefix(value) {
    for (const [scale, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= 0.9995 * scale) return `${digits(value / scale)} ${prefix}`;
    }
    return digits(value);
  }

  function clock(seconds) {
    const rounded = Math.round(seconds);
    const hours = Math.floor(rounded / 3600), minutes = Math.floor(rounded / 60) % 60;
    const twoDigits = (number) => String(number).padStart(2, "0");
    const secondsText = twoDigits(rounded % 60);
    return hours ? `${hours}:${twoDigits(minutes)}:${secondsText}` : `${minutes}:${secondsText}`;
  }

  // A value without a prefix: very small and very large ones have an exponent.
  function withExponent(value) {
    const size = Math.abs(value);
    return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2).replace(/\.?0+e/, "e") : digits(value);
  }

  const valueText = (chart) => chart.is_count ? withPrefix : withExponent;

  // Returns a function that writes a place on the horizontal axis for the readout.
  function placeText(chart) {
    if (chart.axis) {
      const named = new Map(chart.axis.ticks);
      return (place) => `${chart.axis.name} ${named.get(place) || digits(place)}`;
    }
    if (state.axis === "time") return (place) => `after ${clock(place)}`;
    if (state.axis === "tokens") return (place) => `at ${withPrefix(place)} tokens`;
    return (place) => `at update ${place.toLocaleString("en")}`;
  }

  // Writes a place for the ticks of the axis that the reader chose.
  function tickText(place) {
    if (state.axis === "time") return clock(place);
    return state.axis === "tokens" ? withPrefix(place) : place.toLocaleString("en");
  }

  // [level, words] of each value that a chart's lines are compared with.
  const levelsOf = (chart) => Object.entries(chart.levels).map(([name, level]) => [level, `${name} ${level.toFixed(2)}`]);

  // ---- values ----

  function median(values) {
    const sorted = Float64Array.from(values).sort(), half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }

  // The moving median of values, over the share of the run that the reader chose.
  function smoothed(values) {
    const half = Math.floor(values.length * state.smoothing / 200); // the values at each side; `smoothing` is in %
    return half ? values.map((_, i) => median(values.slice(Math.max(0, i - half), i + half + 1))) : values;
  }

  // A series for each line. A trend has two: its values in a pale colour, and their moving median.
  function seriesOf(chart) {
    const series = [];
    for (const line of chart.lines) {
      const table = data.tables[line.table], xs = table[chart.axis ? chart.axis.key : state.axis];
      const column = table[line.key] || [], places = [], values = [];
      column.forEach((value, i) => {
        if (value === null || xs[i] === null || xs[i] === undefined) return;
        // uPlot needs rising places. Of several values at one place, the last counts.
        if (places.at(-1) === xs[i]) {
          places.pop();
          values.pop();
        }
        places.push(xs[i]);
        values.push(value);
      });
      if (!places.length) continue;
      const shade = SHADES[line.shade % SHADES.length], opacity = line.shade < SHADES.length ? 1 : 0.55;
      const base = { label: line.label, shade, opacity, places };
      const isTrend = line.style === "trend" && values.length > 2;
      let dotSize = DOT_SIZES[line.style] || 0;
      // A line of one or two values would hardly be seen without dots.
      if (!dotSize && line.style !== "edge" && places.length < 3) dotSize = 6;
      if (isTrend) series.push({ ...base, values, isPale: true, isReadOut: false, width: 1 });
      series.push({
        ...base,
        key: line.key,
        values: isTrend ? smoothed(values) : values,
        size: dotSize,
        isReadOut: line.label !== "" && line.style !== "edge",
        width: ["dots", "edge", "star"].includes(line.style) ? 0 : 2,
      });
    }
    return series;
  }

  // ---- what is drawn in addition to the lines ----

  // Sets font, colour (the name of a CSS variable) and line width of what is drawn next.
  function setPen(u, role, width) {
    u.ctx.font = FONT.replace("12px", `${12 * uPlot.pxRatio}px`);
    u.ctx.strokeStyle = u.ctx.fillStyle = colour(role);
    u.ctx.lineWidth = width * uPlot.pxRatio;
  }

  // Draws a dotted line at each level, with words at its right. The run's last value has words, too, but no line.
  function drawLevels(u, chart, series) {
    const ratio = uPlot.pxRatio, { left, top, width, height } = u.bbox, gap = 15 * ratio; // the height of words
    const run = series.find((each) => each.isReadOut);
    const labels = levelsOf(chart).map((label) => [...label, "--muted"]);
    if (!labels.length) return;
    if (run) labels.push([run.values.at(-1), `this run ${run.values.at(-1).toFixed(2)}`, "--accent"]);
    const inside = labels.filter(([level]) => level >= u.scales.y.min && level <= u.scales.y.max);
    inside.sort((one, other) => other[0] - one[0]);
    const places = inside.map(([level]) => u.valToPos(level, "y", true));
    // From the top: words that would touch the ones above move down. Then words move up so far that those below
    // them stay inside the chart.
    for (let i = 1; i < places.length; i++) places[i] = Math.max(places[i], places[i - 1] + gap);
    places.forEach((place, i) => {
      places[i] = Math.min(place, top + height - gap * (places.length - 1 - i));
    });
    inside.forEach(([level, text, role], i) => {
      setPen(u, role, 1);
      u.ctx.textAlign = "left";
      u.ctx.textBaseline = "middle";
      u.ctx.fillText(text, left + width + 8 * ratio, places[i]);
      if (role === "--accent") return; // the run itself has a curve instead of a level
      u.ctx.setLineDash([2 * ratio, 3 * ratio]);
      u.ctx.beginPath();
      u.ctx.moveTo(left, u.valToPos(level, "y", true));
      u.ctx.lineTo(left + width, u.valToPos(level, "y", true));
      u.ctx.stroke();
      u.ctx.setLineDash([]);
    });
  }

  // A mark with a label is a dashed line, and a mark without one is a short tick at the bottom.
  function drawMarks(u, chart) {
    const ratio = uPlot.pxRatio, { left, top, width, height } = u.bbox, xs = data.tables[0][state.axis];
    let line = 0, end = -Infinity; // in which line of text the last label stands, and where the labels so far end
    for (const { row, label } of chart.marks) {
      const place = xs[row];
      if (place < u.scales.x.min || place > u.scales.x.max) continue;
      const x = u.valToPos(place, "x", true);
      setPen(u, label ? "--muted" : "--warn", label ? 1 : 2);
      u.ctx.beginPath();
      if (label) u.ctx.setLineDash([3 * ratio, 3 * ratio]);
      u.ctx.moveTo(x, label ? top : top + height - 8 * ratio);
      u.ctx.lineTo(x, top + height);
      u.ctx.stroke();
      u.ctx.setLineDash([]);
      if (!label) continue;
      const labelWidth = u.ctx.measureText(label).width, fitsAtRight = x + labelWidth + 6 * ratio < left + width;
      const begin = fitsAtRight ? x + 4 * ratio : Math.max(left, x - 4 * ratio - labelWidth);
      // A label that would touch an earlier one is written in the next line.
      line = begin < end ? line + 1 : 0;
      end = Math.max(end, begin + labelWidth + 8 * ratio);
      u.ctx.textAlign = "left";
      u.ctx.textBaseline = "top";
      u.ctx.fillText(label, begin, top + (2 + 15 * line) * ratio);
    }
  }

  // ---- one chart ----

  // The ends of the vertical axis; `low` and `high` are the ends of the visible values, null without visible values.
  function limits(u, chart, low, high) {
    const isLog = state.log[chart.name];
    if (!isLog && !u.isZoomed) return chart.limits;
    if (low === null) return isLog ? [0.1, 1] : chart.limits;
    if (isLog) return [low > 0 ? low * 0.9 : high / 1e4, high * 1.1]; // such an axis cannot reach 0
    const room = 0.06 * (high - low) || Math.abs(high) * 0.02 || 1;
    return [low - room, high + room];
  }

  // A logarithmic axis has ticks at 1, 2 and 5 times each power of 10, or at the powers alone if it spans many.
  function logTicks(u, axis, low, high) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const digit of high / low > 1e4 ? [1] : [1, 2, 5]) {
        const value = Number((digit * 10 ** power).toPrecision(1));
        if (value >= low && value <= high) ticks.push(value);
      }
    }
    return ticks.length > 1 ? ticks : [low, high].map((value) => Number(value.toPrecision(2)));
  }

  // The texts of the ticks. A text that would touch the one before it is left out.
  function tickTextsApart(u, ticks, ruler) {
    let end = -Infinity;
    return ticks.map(([at, text]) => {
      const middle = u.valToPos(at, "x"), half = ruler.measureText(text).width / 2;
      if (middle - half < end) return "";
      end = middle + half + 8;
      return text;
    });
  }

  // The ends of the horizontal axis without zoom.
  function endsOf(chart, xs) {
    if (!chart.axis) return xs[0] === xs.at(-1) ? around(xs[0]) : [Math.min(0, xs[0]), xs.at(-1)];
    const all = [...xs, ...chart.axis.ticks.map(([at]) => at)];
    const low = Math.min(...all), high = Math.max(...all);
    if (low === high) return around(low);
    if (!chart.axis.is_log) return [low - 0.06 * (high - low), high + 0.06 * (high - low)];
    const factor = (high / low) ** 0.06;
    return [low / factor, high * factor];
  }

  function around(place) {
    const room = 0.05 * Math.abs(place) || 1;
    return [place - room, place + room];
  }

  // The width in px that the words at the levels need at the chart's right.
  function roomAtRight(chart, ruler) {
    const words = levelsOf(chart).map(([, text]) => text);
    if (!words.length) return 12;
    return 12 + Math.ceil(Math.max(...[...words, "this run 0.00"].map((text) => ruler.measureText(text).width)));
  }

  function axesOf(chart, ruler) {
    const common = {
      stroke: colour("--muted"),
      font: FONT,
      grid: { show: false },
      ticks: { stroke: colour("--rule"), width: 1, size: 4 },
    };
    const text = valueText(chart);
    const x = { ...common, size: 30 };
    if (chart.axis) {
      x.splits = () => chart.axis.ticks.map(([at]) => at);
      x.filter = (u, ticks) => ticks; // uPlot would drop some on a logarithmic axis
      x.values = (u) => tickTextsApart(u, chart.axis.ticks, ruler);
    } else {
      x.space = 56;
      x.values = (u, ticks) => ticks.map(tickText);
    }
    const y = { ...common, size: 52, gap: 6, space: 34 };
    y.ticks = { show: false };
    y.grid = { stroke: colour("--rule"), width: 1 };
    y.values = (u, ticks) => ticks.map((at) => at === null ? "" : text(at));
    if (state.log[chart.name]) {
      y.splits = logTicks;
      y.filter = (u, ticks) => ticks;
    }
    return [x, y];
  }

  function cursorOf(chart, series) {
    const points = {
      size: 7,
      width: 0,
      fill: (u, i) => colour(series[i - 1].shade),
      // `i` is uPlot's index, whose first series is the horizontal axis. `undefined` shows the point, uPlot's default.
      show: (u, i) => series[i - 1].isReadOut ? undefined : false,
    };
    const drag = { x: true, y: false, dist: 6 };
    // Of many lines, the one within 24 px of the pointer is highlighted. -1 means that none is.
    const cursor = { y: false, drag, points, focus: { prox: hasManyLines(series) ? 24 : -1 } };
    // The pointer and the zoom are the same in all charts over the chosen axis.
    if (!chart.axis) cursor.sync = { key: "run", scales: ["x", null], setSeries: false };
    return cursor;
  }

  function uPlotSeries(each) {
    return {
      label: each.label,
      spanGaps: true,
      width: each.width,
      alpha: each.isPale ? 0.3 : each.opacity,
      stroke: colour(each.shade),
      points: { show: Boolean(each.size), size: each.size, fill: colour(each.shade), width: 0 },
    };
  }

  // The indices are uPlot's, whose first series is the horizontal axis.
  function bandOf(chart, series) {
    const [low, high] = chart.band.map((key) => series.findIndex((each) => each.key === key) + 1);
    return { series: [high, low], fill: colour("--band") };
  }

  function draw(chart) {
    const figure = document.getElementById(`chart-${chart.name}`), place = figure.querySelector(".plot");
    const series = seriesOf(chart);
    if (!series.length) return;
    plots.get(chart.name)?.destroy();
    place.replaceChildren();
    const values = uPlot.join(series.map((each) => [each.places, each.values]));
    const xs = values[0], ends = endsOf(chart, xs);
    const ruler = document.createElement("canvas").getContext("2d");
    ruler.font = FONT;
    // uPlot calls this with the ends that a zoom asks for, or with the first and last place for no zoom.
    const xRange = (u, low, high) => {
      u.isZoomed = xs.length > 1 && low !== null && (low !== xs[0] || high !== xs.at(-1));
      return u.isZoomed ? [low, high] : ends;
    };
    const u = new uPlot({
      width: place.clientWidth,
      height: place.clientHeight,
      padding: [10, roomAtRight(chart, ruler), 0, 0],
      legend: { show: false },
      cursor: cursorOf(chart, series),
      focus: { alpha: hasManyLines(series) ? 0.25 : 1 },
      scales: {
        x: { time: false, distr: chart.axis?.is_log ? LOG : LINEAR, range: xRange },
        y: { distr: state.log[chart.name] ? LOG : LINEAR, range: (u, low, high) => limits(u, chart, low, high) },
      },
      axes: axesOf(chart, ruler),
      series: [{}, ...series.map(uPlotSeries)],
      bands: chart.band ? [bandOf(chart, series)] : [],
      hooks: {
        draw: [(u) => drawLevels(u, chart, series), (u) => drawMarks(u, chart)],
        setCursor: [(u) => readOut(u, figure, chart, series)],
        setScale: [(u, key) => { if (key === "x") updateButtons(figure, chart, u.isZoomed); }],
      },
    }, values, place);
    u.fullRange = ends;
    plots.set(chart.name, u);
    readOut(u, figure, chart, series);
    updateButtons(figure, chart, false);
  }

  // ---- the readout ----

  const hasManyLines = (series) => series.filter((each) => each.isReadOut).length > MAX_READ_OUT;

  // The value of a series at an index, or the last value before it: a line may have values at few of the places.
  function valueAt(chart, column, index) {
    if (chart.axis) return column[index] ?? null;
    for (let i = index; i >= 0; i--) {
      if (column[i] !== null && column[i] !== undefined) return column[i];
    }
    return null;
  }

  // The index that is read out without a pointer: the best setting of a sweep, or the end of a run.
  function defaultIndex(u, series) {
    const best = series.find((each) => each.key === "best");
    return best ? u.data[0].indexOf(best.places[0]) : u.data[0].length - 1;
  }

  function readOut(u, figure, chart, series) {
    const index = u.cursor.idx ?? defaultIndex(u, series), text = valueText(chart);
    const seriesAndValues = series.map((each, i) => [each, valueAt(chart, u.data[i + 1], index)]);
    let shown = seriesAndValues.filter(([each, value]) => each.isReadOut && value !== null);
    const readout = figure.querySelector(".readout");
    if (hasManyLines(series)) {
      if (u.cursor.idx === null || u.cursor.idx === undefined) {
        readout.textContent = `${shown.length} lines; point at one to read it`;
        return;
      }
      const atPointer = u.posToVal(u.cursor.top, "y");
      shown.sort((one, other) => Math.abs(one[1] - atPointer) - Math.abs(other[1] - atPointer));
      shown = shown.slice(0, 1); // the line nearest to the pointer
    }
    readout.replaceChildren(placeText(chart)(u.data[0][index]), ...shown.map(([each, value]) => {
      const entry = document.createElement("span"), swatch = document.createElement("i");
      swatch.style.background = `var(${each.shade})`;
      entry.append(swatch, `${each.label} ${text(value)}`);
      return entry;
    }));
  }

  // ---- buttons, keys and menus ----

  // Adds the buttons of a chart, at the first call, and shows the button that resets the zoom if there is a zoom.
  function updateButtons(figure, chart, isZoomed) {
    let place = figure.querySelector(".tools");
    if (!place) {
      place = document.createElement("span");
      place.className = "tools";
      figure.querySelector("figcaption").append(place);
      place.append(button("reset zoom", () => resetZoom(chart)));
      if (!chart.band && seriesOf(chart).every((each) => each.values.every((value) => value > 0))) {
        const log = button("log", () => {
          state.log[chart.name] = !state.log[chart.name];
          log.setAttribute("aria-pressed", state.log[chart.name]);
          saveChoices();
          draw(chart);
        });
        log.title = "logarithmic scale";
        log.setAttribute("aria-pressed", Boolean(state.log[chart.name]));
        place.append(log);
      }
      listenToKeysAndTouch(figure.querySelector(".plot"), chart);
    }
    place.firstChild.hidden = !isZoomed;
  }

  function button(text, press) {
    const element = document.createElement("button");
    element.type = "button";
    element.textContent = text;
    element.addEventListener("click", press);
    return element;
  }

  // Resets the zoom of a chart, and of all charts that share its axis.
  function resetZoom(chart) {
    for (const [name, u] of plots) {
      const isOverChosenAxis = chartsOverChosenAxis.some((each) => each.name === name);
      const xs = u.data[0];
      if (name === chart.name || (isOverChosenAxis && !chart.axis)) u.setScale("x", { min: xs[0], max: xs.at(-1) });
    }
  }

  function listenToKeysAndTouch(place, chart) {
    place.tabIndex = 0;
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", `${chart.title}. Left and right read values, plus and minus zoom, Escape shows all.`);
    place.addEventListener("keydown", (event) => {
      const u = plots.get(chart.name), xs = u.data[0], index = u.cursor.idx ?? xs.length - 1;
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -xs.length, End: xs.length }[event.key];
      if (step) moveCursor(u, Math.min(xs.length - 1, Math.max(0, index + step)));
      else if (event.key === "+" || event.key === "-") zoom(u, xs[index], event.key === "+" ? 0.5 : 2);
      else if (event.key === "Escape") resetZoom(chart);
      else return;
      event.preventDefault();
      figureOf(place).querySelector(".readout").setAttribute("aria-live", "polite");
    });
    const moveToTouch = (event) => {
      if (event.pointerType === "mouse") return; // uPlot follows the mouse itself
      const u = plots.get(chart.name), box = u.over.getBoundingClientRect();
      u.setCursor({ left: event.clientX - box.left, top: event.clientY - box.top });
    };
    place.addEventListener("pointerdown", moveToTouch);
    place.addEventListener("pointermove", moveToTouch);
  }

  const figureOf = (element) => element.closest("figure");

  function moveCursor(u, index) {
    const left = u.valToPos(u.data[0][index], "x");
    u.setCursor({ left: Math.min(Math.max(left, 0), u.over.clientWidth), top: 0 });
  }

  // Shows `factor` times as much of the horizontal axis as now, around a place. All of it is no zoom.
  function zoom(u, middle, factor) {
    const half = (u.scales.x.max - u.scales.x.min) * factor / 2;
    const low = Math.max(u.fullRange[0], middle - half), high = Math.min(u.fullRange[1], middle + half);
    if (low <= u.fullRange[0] && high >= u.fullRange[1]) u.setScale("x", { min: u.data[0][0], max: u.data[0].at(-1) });
    else if (high > low) u.setScale("x", { min: low, max: high });
  }

  // Adds the menu of horizontal axes and the slider of the smoothing, above the charts.
  function addControls() {
    if (!chartsOverChosenAxis.length) return;
    const place = document.createElement("div");
    place.className = "controls";
    const axis = document.createElement("select");
    for (const [key, name] of Object.entries(data.axes)) {
      if (key !== "time" || hasTime) axis.add(new Option(name, key, false, key === state.axis));
    }
    axis.addEventListener("change", () => {
      state.axis = axis.value;
      saveChoices();
      chartsOverChosenAxis.forEach(draw);
    });
    place.append(labelled("Horizontal axis", axis));
    if (chartsOverChosenAxis.some((chart) => chart.lines.some((line) => line.style === "trend"))) {
      const smoothing = document.createElement("input");
      Object.assign(smoothing, { type: "range", min: 0, max: 10, step: 0.5, value: state.smoothing });
      const text = () => smoothing.setAttribute("aria-valuetext", `median of ${state.smoothing} % of the run`);
      text();
      smoothing.addEventListener("input", () => {
        state.smoothing = Number(smoothing.value);
        text();
        saveChoices();
        chartsOverChosenAxis.forEach(draw);
      });
      place.append(labelled("Smoothing", smoothing));
    }
    const hint = document.createElement("span");
    hint.textContent = "Drag across a chart to zoom.";
    place.append(hint);
    document.querySelector(".drawings").before(place);
  }

  function labelled(text, element) {
    const label = document.createElement("label");
    label.append(text, element);
    return label;
  }

  if (!hasTime && state.axis === "time") state.axis = "tokens";
  addControls();
  data.charts.forEach(draw);
  const watcher = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const u = plots.get(figureOf(target).id.slice("chart-".length));
      if (u && u.width !== target.clientWidth) u.setSize({ width: target.clientWidth, height: target.clientHeight });
    }
  });
  document.querySelectorAll(".plot").forEach((place) => watcher.observe(place));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => data.charts.forEach(draw));
})();
