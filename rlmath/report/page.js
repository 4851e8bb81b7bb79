"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#b5508f", "#c28800", "#3f9fd6", "#6a4fb3", "#666666", "#7a9a01", "#8c5a2b"];
  const DARK = ["#5cb8f0", "#ff8f4a", "#3fd0a4", "#ea9cca", "#f2c14e", "#9fd8ff", "#b39df5", "#bbbbbb", "#b5d33d", "#c9986a"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const palette = () => (dark.matches ? DARK : LIGHT);
  const color = (number) => palette()[number % palette().length];
  /* Plotly reads tags and entities in names; text that others wrote has none. */
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // ------------------------------------------------------------ figures

  /* The legend has no place for a longer line: 6 pixels a character, and the line's sample. */
  function legendName(text, width) {
    const most = Math.max(8, Math.floor((width - 60) / 6));
    return [...(text.match(new RegExp(`.{1,${most}}`, "gsu")) || [])].map(plain).join("<br>");
  }

  function traces(figure, width) {
    const value = figure.percent ? "%{y:.2%}" : "%{y:.5~g}";
    return figure.traces.map((one) => {
      const dash = Math.floor(one.color / palette().length) + (one.dash || 0);
      const trace = {
        type: "scatter", name: legendName(one.name, width), x: one.x, y: one.y,
        mode: one.y.length === 1 ? "markers" : one.y.length < 40 ? "lines+markers" : "lines",
        marker: { size: one.y.length === 1 ? 8 : 4 },
        line: { color: color(one.color), width: 1.7, dash: DASHES[dash % DASHES.length] },
        hovertemplate: value + (figure.traces.length > 1 ? "" : "<extra></extra>"),
      };
      if (figure.stack) Object.assign(trace, { stackgroup: "all", mode: one.y.length === 1 ? "markers" : "lines" });
      return trace;
    });
  }

  function yAxis(figure) {
    const all = figure.traces.flatMap((one) => one.y);
    const low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
    const format = figure.percent ? ".3~%" : figure.log ? ".1e" : high >= 1000 ? ",.6~g" : undefined;
    return {
      type: figure.log ? "log" : "linear", tickformat: format, exponentformat: "power", nticks: figure.log ? 6 : 8,
      rangemode: figure.stack ? "tozero" : low >= 0 ? "nonnegative" : "normal",
      ...(figure.range ? { range: figure.range } : {}),
    };
  }

  /* Steps and counts are whole: where an axis shows few of them, every one has its number, and no half has. */
  function wholeTicks(place, figure) {
    const changes = {}, modes = place.tickModes || { xaxis: "auto", yaxis: "auto" };
    for (const [name, isWhole] of [["xaxis", true], ["yaxis", figure.whole && !figure.percent && !figure.log]]) {
      const axis = place._fullLayout[name], span = Math.abs(axis.range[1] - axis.range[0]);
      const mode = isWhole && span <= place.layout[name].nticks ? "linear" : "auto";
      if (modes[name] === mode) continue;
      changes[name + ".tickmode"] = modes[name] = mode;
      if (mode === "linear") Object.assign(changes, { [name + ".tick0"]: 0, [name + ".dtick"]: 1 });
    }
    place.tickModes = modes;
    if (Object.keys(changes).length) Plotly.relayout(place, changes);
  }

  function layout(figure, width) {
    const axis = {
      gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, automargin: true,
      title: { font: { size: 12, color: css("--soft") }, standoff: 8 },
    };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif", size: 12, color: css("--text") },
      margin: { l: 8, r: 8, t: 8, b: 8 },
      showlegend: figure.legend,
      legend: { orientation: "h", x: 0, y: -0.24, yanchor: "top", font: { size: 11 }, maxheight: 90 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--link") },
      hovermode: figure.traces.length > 12 ? "closest" : "x unified",
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text") }, namelength: 60 },
      xaxis: {
        ...axis, title: { ...axis.title, text: "step" }, nticks: width < 420 ? 6 : 10, minallowed: 0, tickformat: ",d",
      },
      yaxis: {
        ...axis, ...yAxis(figure), title: { ...axis.title, text: plain(figure.unit) },
      },
      shapes: data.markers.map((one) => ({
        type: "line", x0: one.x, x1: one.x, yref: "paper", y0: 0, y1: 1,
        line: { color: one.kind === "rollback" ? css("--error") : css("--soft"), width: 1, dash: "dot" },
      })),
    };
  }

  const canHover = window.matchMedia("(hover: hover)").matches;
  const drawn = new Set();
  const widths = new ResizeObserver((entries) => {
    for (const { target } of entries) if (target.clientWidth !== target.drawnWidth) draw(target);
  });
  function draw(place) {
    const figure = data.figures[Number(place.dataset.figure)];
    const config = {
      displaylogo: false, displayModeBar: canHover ? "hover" : false,
      modeBarButtons: [["toImage", "resetScale2d"]],
    };
    place.drawnWidth = place.clientWidth;
    Plotly.react(place, traces(figure, place.clientWidth), layout(figure, place.clientWidth), config);
    if (!drawn.has(place)) {
      place.on("plotly_relayout", () => wholeTicks(place, figure));
      widths.observe(place);
    }
    place.tickModes = undefined;
    wholeTicks(place, figure);
    drawn.add(place);
    document.documentElement.dataset.drawn = String(drawn.size);
  }

  const places = [...document.querySelectorAll(".plot")];
  function watch(rootMargin, then) {
    const watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) {
          watcher.unobserve(entry.target);
          then(entry.target);
        }
      }
    }, { rootMargin });
    for (const place of places) watcher.observe(place);
  }
  const drawOnce = (place) => { if (!drawn.has(place)) draw(place); };
  const whenIdle = window.requestIdleCallback || ((run) => setTimeout(run, 50)); /* Safari has none */
  const inView = (place) => {
    const box = place.getBoundingClientRect();
    return box.bottom > 0 && box.top < window.innerHeight;
  };
  places.filter(inView).forEach(draw); /* now: an observer waits for a frame */
  watch("0px", drawOnce);
  watch("300px", (place) => whenIdle(() => drawOnce(place)));
  dark.addEventListener("change", () => { drawn.forEach(draw); swatches(); });
  window.addEventListener("beforeprint", () => places.forEach(draw));

  function swatches() {
    for (const one of document.querySelectorAll(".swatch")) one.style.background = color(Number(one.dataset.color));
  }
  swatches();

  // ------------------------------------------------------------ samples; all text is set as text

  const browser = document.getElementById("browser");
  if (!browser) return;

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }
  function choice(label, options, onChange) {
    const outer = element("label", "small", label + " ");
    const select = element("select");
    options.forEach((text, number) => {
      const option = element("option", "", text);
      option.value = String(number);
      select.append(option);
    });
    select.addEventListener("change", onChange);
    outer.append(select);
    return [outer, select];
  }
  const KINDS = ["all groups", "some right, some wrong", "all right", "all wrong"];
  const isOfKind = (group, kind) =>
    kind === 0 || (kind === 1 && group.right > 0 && group.right < group.sampled) ||
    (kind === 2 && group.right === group.sampled) || (kind === 3 && group.right === 0);

  const controls = element("div", "controls");
  const shown = element("div");
  browser.append(controls, shown);
  const withSamples = data.samples.filter((run) => run.groups.length);
  const [runLabel, runSelect] = choice("Run", withSamples.map((run) => run.label), () => fillSteps());
  const [kindLabel, kindSelect] = choice("Show", KINDS, () => fillSteps());
  kindSelect.selectedIndex = data.samples.some((run) => run.groups.some((group) => isOfKind(group, 1))) ? 1 : 0;
  const [stepLabel, stepSelect] = choice("Step", [], () => show());
  const earlier = element("button", "", "Earlier");
  const later = element("button", "", "Later");
  if (withSamples.length > 1) controls.append(runLabel);
  controls.append(kindLabel, stepLabel, earlier, later);
  earlier.addEventListener("click", () => { stepSelect.selectedIndex -= 1; show(); });
  later.addEventListener("click", () => { stepSelect.selectedIndex += 1; show(); });

  let groups = [];
  function fillSteps() {
    const before = stepSelect.value;
    groups = withSamples[runSelect.selectedIndex].groups.filter((group) => isOfKind(group, kindSelect.selectedIndex));
    const steps = [...new Set(groups.map((group) => group.step))];
    stepSelect.replaceChildren(...steps.map((step) => {
      const option = element("option", "", String(step));
      option.value = String(step);
      return option;
    }));
    stepSelect.value = before;
    if (stepSelect.selectedIndex < 0) stepSelect.selectedIndex = steps.length - 1;
    show();
  }
  function facts(one) {
    const parts = [];
    if (one.reward !== null) parts.push("reward " + signed(one.reward));
    for (const [name, value] of one.rewards) parts.push(name + " " + (value === null ? "failed" : signed(value)));
    if (one.advantage !== null) parts.push("advantage " + signed(one.advantage));
    if (one.length !== null) parts.push(one.length + " tokens");
    if (one.finish) parts.push("ended by " + one.finish);
    if (one.verdict) parts.push("verified by " + one.verdict);
    if (one.extracted) parts.push("answer " + one.extracted);
    for (const [name, why] of one.failures) parts.push(name + " failed: " + why);
    return parts.join(" · ");
  }
  const signed = (value) => (value > 0 ? "+" : "") + String(Number(value.toPrecision(4)));

  function show() {
    const step = Number(stepSelect.value);
    earlier.disabled = stepSelect.selectedIndex <= 0;
    later.disabled = stepSelect.selectedIndex >= stepSelect.options.length - 1;
    const boxes = groups.filter((group) => group.step === step).map((group) => {
      const box = element("div", "box padded group");
      const failed = group.kind === "failure" ? ", a group with answers that could not be judged" : "";
      box.append(element("h3", "", `Prompt ${group.id}: ${group.right} of ${group.sampled} right${failed}`));
      box.append(element("pre", "", group.prompt));
      if (group.solutions.length) box.append(element("p", "facts", "solution: " + group.solutions.join(" | ")));
      for (const one of group.completions) {
        const part = element("div", one.correct ? "completion right" : "completion");
        const line = element("div", "facts");
        line.append(element("b", "", one.correct ? "right" : "wrong"), " · " + facts(one));
        part.append(line);
        for (const [call, text] of one.parts || [["", one.text]]) {
          if (call) part.append(element("div", "facts", "output: " + call));
          part.append(element("pre", call ? "output" : "", text));
        }
        box.append(part);
      }
      const more = group.sampled - group.completions.length;
      if (more > 0) box.append(element("p", "facts", `${more} more completions are left out.`));
      return box;
    });
    shown.replaceChildren(...(boxes.length ? boxes : [element("p", "soft", "No group of this kind.")]));
  }
  fillSteps();
})();
