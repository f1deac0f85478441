"use strict";
// Memory and lanes of each panel share one time axis. Bars of one colour and lane are one SVG path, so that thousands of
// them cost little; what lies under the pointer is found in the data.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const LEFT = 58, RIGHT = 10, MEMORY = 210, TOP = 16, AXIS = 22, ROW = 24, GAP = 7, NEAR_PX = 5;
  const LANE = 0, NAME = 1, START = 2, END = 3, ID = 4, BYTES = 5, WAITED = 6, CAUSE = 7, EARLIER = 8, HELD = 9;
  const AWAY = 44, AWAY_PARTS = [["block inputs on the host", "inputs"], ["activations swapped away", "swap"]];
  const view = { from: 0, to: data.seconds };
  const STEPS = [1, 2, 5];

  const html = (name, attributes = {}, ...children) => {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const svg = (name, attributes = {}, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const colour = (name) => `var(--${name})`;

  const bytesText = (bytes) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let place = 0;
    while (bytes >= 1024 && place < units.length - 1) { bytes /= 1024; place += 1; }
    return `${place && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[place]}`;
  };
  const secondsText = (seconds, digits = 3) => {
    const size = Math.abs(seconds);
    if (size >= 1) return `${seconds.toFixed(digits)} s`;
    if (size >= 1e-3) return `${(seconds * 1e3).toFixed(size >= 0.1 ? 0 : Math.min(2, digits))} ms`;
    return size ? `${(seconds * 1e6).toFixed(0)} µs` : "0 s";
  };
  const niceStep = (span, count) => {
    const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
    return power * (STEPS.find((step) => step * power >= rough) ?? 10);
  };
  const niceBytes = (most) => {
    let unit = 1;
    while (most / unit >= 1024) unit *= 1024;
    return niceStep(most / unit, 4) * unit;
  };

  class Panel {
    constructor(panel) {
      this.data = panel;
      this.lanes = panel.lanes.map((_, lane) => panel.bars.filter((bar) => bar[LANE] === lane));
      const total = panel.levels.map((level) => level.slice(1).reduce((sum, bytes) => sum + bytes, 0));
      const peak = Math.max(...total, panel.peak, panel.reserved ?? 0);
      this.peakBeyond = panel.peak > 1.001 * Math.max(...total);  // between the moments at which memory was read
      this.limitShown = panel.limit <= 2.5 * peak;
      this.most = 1.08 * Math.max(peak, this.limitShown ? panel.limit : 0);
      const highest = total.indexOf(Math.max(...total));
      const ends = panel.levels[highest + 1]?.[0] ?? panel.step;
      this.moment = highest < 0 ? 0 : (panel.levels[highest][0] + ends) / 2;
      this.bar = null;
      this.build();
    }

    build() {
      this.awayMost = Math.max(0, ...this.data.away.map(([, inputs, held]) => inputs + held));
      this.away = this.awayMost ? AWAY + GAP : 0;
      const height = TOP + MEMORY + AXIS + this.away + this.lanes.length * (ROW + GAP) + 4;
      this.svg = svg("svg", { height, "aria-hidden": "true" });
      this.charts = html("div", {
        class: "charts", tabindex: "0", role: "group",
        "aria-label": `${this.data.title}: GPU memory and lanes. Arrow keys go from bar to bar and from lane to lane; plus, minus and 0 zoom.`,
      }, this.svg);
      this.values = this.data.parts.map(() => html("b"));
      this.when = html("b");
      const ever = this.data.parts.map((_, part) => this.data.levels.some((level) => level[part + 1]));
      const parts = this.data.parts.map(([name, key], at) => this.item(key, name, this.values[at]));
      this.awayValues = AWAY_PARTS.map(() => html("b"));
      const awayEver = AWAY_PARTS.map((_, part) => this.data.away.some((level) => level[part + 1]));
      const away = AWAY_PARTS.map(([name, key], at) => this.item(key, name, this.awayValues[at]));
      const shownParts = [...parts.filter((_, at) => ever[at]).reverse(), ...away.filter((_, at) => awayEver[at])];
      const used = new Set(this.data.bars.map((bar) => bar[NAME]));
      const names = this.data.names.filter((_, at) => used.has(at)).map(([name, key]) => this.item(key, name));
      const stalled = this.lanes[0].reduce((sum, bar) => sum + bar[WAITED], 0);
      if (stalled > 0.001 * this.data.step) names.push(html("li", {}, html("i", { class: "stall" }), "compute waits"));
      if (this.data.bars.some((bar) => bar[EARLIER])) {
        names.push(html("li", {}, html("i", { class: "pale" }), "paler: of the step before"));
      }
      this.detail = html("output", { class: "detail", "aria-live": "polite" });
      this.node = html("section", { class: "panel" },
        html("h2", {}, this.data.title),
        html("ul", { class: "legend", "aria-label": "GPU memory at this moment" }, html("li", {}, this.when), ...shownParts),
        this.charts,
        html("ul", { class: "legend", "aria-label": "Colours of the lanes" }, ...names),
        this.detail);
      this.svg.addEventListener("pointermove", (event) => this.point(event));
      this.svg.addEventListener("pointerdown", (event) => this.point(event));
      this.charts.addEventListener("keydown", (event) => this.key(event));
    }

    item(key, name, value) {
      const swatch = html("i");
      swatch.style.background = colour(key);
      return html("li", {}, swatch, name, ...(value ? [value] : []));
    }

    x(seconds) { return LEFT + (seconds - view.from) / (view.to - view.from) * (this.width - LEFT - RIGHT); }
    seconds(x) { return view.from + (x - LEFT) / (this.width - LEFT - RIGHT) * (view.to - view.from); }
    y(bytes) { return TOP + MEMORY * (1 - bytes / this.most); }
    laneTop(lane) { return TOP + MEMORY + AXIS + this.away + lane * (ROW + GAP); }

    draw() {
      this.width = this.svg.clientWidth || 800;
      const right = this.width - RIGHT, bottom = TOP + MEMORY;
      const nodes = [];
      const clip = `clip-${charts.indexOf(this)}`;
      const defs = svg("defs");
      const box = svg("clipPath", { id: clip });
      box.append(svg("rect", { x: LEFT, y: 0, width: Math.max(0, right - LEFT), height: 5000 }));
      const hatch = svg("pattern", { id: `${clip}-hatch`, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
      hatch.append(svg("rect", { width: 2, height: 5, fill: colour("limit") }));
      defs.append(box, hatch);
      nodes.push(defs);
      this.grid(nodes, right, bottom);
      const inside = svg("g", { "clip-path": `url(#${clip})` });
      this.drawMemory(inside);
      if (this.away) this.drawAway(nodes, inside, right);
      this.drawLanes(inside, `${clip}-hatch`);
      nodes.push(inside);
      this.drawLimit(nodes, right);
      this.cursor = svg("line", { class: "cursor", y1: TOP, y2: this.laneTop(this.lanes.length) - GAP });
      this.chosen = svg("rect", { class: "chosen", height: ROW, rx: 2 });
      inside.append(this.cursor, this.chosen);
      this.svg.replaceChildren(...nodes);
      this.show();
    }

    grid(nodes, right, bottom) {
      const bytesStep = niceBytes(this.most);
      for (let bytes = 0; bytes <= this.most; bytes += bytesStep) {
        const y = this.y(bytes);
        nodes.push(svg("line", { class: "grid", x1: LEFT, x2: right, y1: y, y2: y }));
        nodes.push(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, bytes ? bytesText(bytes).replace(".0", "") : "0"));
      }
      const step = niceStep(view.to - view.from, Math.max(2, (this.width - LEFT) / 90));
      const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
      for (let at = Math.ceil(view.from / step - 1e-9) * step; at <= view.to + step * 1e-6; at += step) {
        const x = this.x(at);
        nodes.push(svg("line", { class: "grid", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
        const text = view.to >= 1 || step >= 1 ? `${at.toFixed(digits)} s` : `${(at * 1e3).toFixed(Math.max(0, digits - 3))} ms`;
        const anchor = x > right - 24 ? "end" : x < LEFT + 12 ? "start" : "middle";
        nodes.push(svg("text", { x, y: bottom + 16, "text-anchor": anchor }, text));
      }
      this.data.lanes.forEach(([name, meaning], lane) => {
        const text = svg("text", { class: "strong", x: LEFT - 6, y: this.laneTop(lane) + ROW / 2 + 4, "text-anchor": "end" }, name);
        text.append(svg("title", {}, meaning));
        const y = this.laneTop(lane) + ROW + GAP / 2;
        nodes.push(text, svg("line", { class: "grid", x1: LEFT, x2: right, y1: y, y2: y }));
      });
    }

    stack(inside, levels, parts, y) {
      const below = levels.map(() => 0);
      parts.forEach(([, key], part) => {
        const above = levels.map((level, at) => below[at] + level[part + 1]);
        if (above.some((bytes, at) => bytes > below[at])) {
          const ends = levels.map((_, at) => levels[at + 1]?.[0] ?? this.data.step);
          const up = levels.map(([from], at) => `${this.x(from).toFixed(1)} ${y(above[at]).toFixed(1)}H${this.x(ends[at]).toFixed(1)}`);
          const down = levels.map(([from], at) => `${this.x(ends[at]).toFixed(1)} ${y(below[at]).toFixed(1)}H${this.x(from).toFixed(1)}`).reverse();
          inside.append(svg("path", { class: "part", fill: colour(key), d: `M${up.join("L")}L${down.join("L")}Z` }));
        }
        above.forEach((bytes, at) => { below[at] = bytes; });
      });
    }

    drawAway(nodes, inside, right) {
      const bottom = this.laneTop(0) - GAP;
      this.stack(inside, this.data.away, AWAY_PARTS, (bytes) => bottom - (AWAY - 12) * bytes / this.awayMost);
      const text = svg("text", { class: "strong", x: LEFT - 6, y: bottom - 4, "text-anchor": "end" }, "away");
      text.append(svg("title", {}, "what waits on the host between forward and backward"));
      nodes.push(text, svg("line", { class: "grid", x1: LEFT, x2: right, y1: bottom, y2: bottom }));
      nodes.push(svg("text", { x: right, y: bottom - AWAY + 10, "text-anchor": "end" }, `waiting on the host: up to ${bytesText(this.awayMost)}`));
    }

    drawMemory(inside) {
      this.stack(inside, this.data.levels, this.data.parts, (bytes) => this.y(bytes));
      const x = this.x(this.data.step);
      inside.append(svg("line", { class: "grid", x1: x, x2: x, y1: TOP, y2: this.laneTop(this.lanes.length) }));
    }

    drawLimit(nodes, right) {
      if (this.peakBeyond) {
        const y = this.y(this.data.peak);
        nodes.push(svg("line", { class: "peak", x1: LEFT, x2: right, y1: y, y2: y }));
        nodes.push(svg("text", { class: "strong", x: right, y: y + 13, "text-anchor": "end" }, `peak between readings ${bytesText(this.data.peak)}`));
      }
      if (this.data.reserved !== null) {  // by torch, of which tensors are a part
        const y = this.y(this.data.reserved);
        nodes.push(svg("line", { class: "peak", x1: LEFT, x2: right, y1: y, y2: y }));
        nodes.push(svg("text", { class: "strong", x: LEFT + 4, y: y + 13 }, `reserved at most ${bytesText(this.data.reserved)}`));
      }
      const text = `limit ${bytesText(this.data.limit)}`;
      if (!this.limitShown) {
        nodes.push(svg("text", { class: "limit-text", x: right, y: TOP - 4, "text-anchor": "end" }, `${text}, far above`));
        return;
      }
      const y = this.y(this.data.limit);
      nodes.push(svg("line", { class: "limit", x1: LEFT, x2: right, y1: y, y2: y }));
      nodes.push(svg("text", { class: "limit-text", x: right, y: y - 4, "text-anchor": "end" }, text));
    }

    drawLanes(inside, hatch) {
      const paths = new Map();
      const add = (key, text) => paths.set(key, (paths.get(key) ?? "") + text);
      this.lanes.forEach((bars, lane) => {
        const top = this.laneTop(lane);
        for (const bar of bars) {
          if (bar[END] < view.from || bar[START] - bar[WAITED] > view.to) continue;
          const from = this.x(Math.max(bar[START], 0)), to = this.x(Math.min(bar[END], this.data.step));
          if (lane === 0 && bar[WAITED] > 0) {
            const width = Math.max(0.5, from - this.x(bar[START] - bar[WAITED]));
            add("stall", `M${(from - width).toFixed(1)} ${top}h${width.toFixed(1)}v${ROW}h-${width.toFixed(1)}z`);
          }
          if (to <= from) continue;
          const gap = to - from > 3 ? 0.6 : 0;  // neighbours of one colour stay apart
          const width = Math.max(0.8, to - from - gap).toFixed(2);
          add(`${bar[NAME]} ${bar[EARLIER]}`, `M${from.toFixed(2)} ${top}h${width}v${ROW}h-${width}z`);
        }
      });
      for (const [key, d] of paths) {
        const [name, earlier] = key.split(" ");
        const fill = key === "stall" ? `url(#${hatch})` : colour(this.data.names[name][1]);
        inside.append(svg("path", { d, fill, class: earlier === "1" ? "earlier" : "" }));
      }
    }

    point(event) {
      const box = this.svg.getBoundingClientRect();
      const x = event.clientX - box.left, y = event.clientY - box.top;
      const lane = Math.floor((y - this.laneTop(0)) / (ROW + GAP));
      this.bar = lane >= 0 && lane < this.lanes.length ? this.nearest(lane, x) : null;
      showMoment(Math.min(Math.max(this.seconds(x), 0), data.seconds), this);
    }

    nearest(lane, x) {
      let best = null, least = NEAR_PX;
      for (const bar of this.lanes[lane]) {
        const from = this.x(lane === 0 ? bar[START] - bar[WAITED] : bar[START]), to = this.x(bar[END]);
        const away = Math.max(from - x, x - to, 0);
        if (away < least || (away === 0 && least > 0)) { best = bar; least = away; }
      }
      return best;
    }

    key(event) {
      const keys = {
        ArrowLeft: () => this.go(0, -1), ArrowRight: () => this.go(0, 1),
        ArrowUp: () => this.go(-1, 0), ArrowDown: () => this.go(1, 0),
        "+": () => zoom(0.5, this.moment), "=": () => zoom(0.5, this.moment),
        "-": () => zoom(2, this.moment), 0: () => zoom(Infinity, 0),
      };
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    }

    go(lanes, bars) {
      const lane = Math.min(Math.max((this.bar?.[LANE] ?? 0) + lanes, 0), this.lanes.length - 1);
      const row = this.lanes[lane];
      if (!row.length) return;
      const near = row.findLastIndex((bar) => bar[START] <= this.moment);
      const at = this.bar?.[LANE] === lane ? row.indexOf(this.bar) + bars : near;
      this.bar = row[Math.min(Math.max(at, 0), row.length - 1)];
      const middle = (Math.max(this.bar[START], 0) + Math.min(this.bar[END], this.data.step)) / 2;
      if (middle < view.from || middle > view.to) pan(middle - (view.from + view.to) / 2);
      showMoment(middle, this);
    }

    show() {
      const levels = this.data.levels;
      const at = levels.findLastIndex((level) => level[0] <= this.moment);
      const level = this.moment <= this.data.step ? levels[Math.max(at, 0)] : undefined;
      const sum = level ? level.slice(1).reduce((total, bytes) => total + bytes, 0) : 0;
      this.when.textContent = `at ${secondsText(this.moment)}: ${level ? bytesText(sum) : "–"}`;
      this.values.forEach((node, part) => { node.textContent = level ? bytesText(level[part + 1]) : "–"; });
      const gone = this.data.away.findLast((one) => one[0] <= this.moment);
      this.awayValues.forEach((node, part) => { node.textContent = level ? bytesText(gone?.[part + 1] ?? 0) : "–"; });
      const x = this.x(this.moment);
      this.cursor.setAttribute("x1", x);
      this.cursor.setAttribute("x2", x);
      this.chosen.setAttribute("visibility", this.bar ? "visible" : "hidden");
      if (!this.bar) { this.detail.textContent = "Point at a bar to see what it is and what it waited for."; return; }
      const from = this.x(Math.max(this.bar[START], 0)), to = this.x(Math.min(this.bar[END], this.data.step));
      this.chosen.setAttribute("x", from);
      this.chosen.setAttribute("y", this.laneTop(this.bar[LANE]));
      this.chosen.setAttribute("width", Math.max(1, to - from));
      this.detail.replaceChildren(html("b", {}, this.bar[ID]), this.describe(this.bar));
    }

    describe(bar) {
      const words = [` on ${this.data.lanes[bar[LANE]][0]}: ${secondsText(bar[END] - bar[START])} from ${secondsText(bar[START])}`];
      if (bar[BYTES]) {
        const rate = bar[BYTES] / (bar[END] - bar[START]) / 1e9;
        words.push(bytesText(bar[BYTES]) + (Number.isFinite(rate) ? ` at ${rate.toPrecision(3)} GB/s` : ""));
      }
      if (bar[HELD] && bar[HELD] < bar[BYTES]) words.push(`of it ${bytesText(bar[HELD])} activations, the rest block inputs`);
      if (bar[WAITED] > 0) words.push(`its lane was free for ${secondsText(bar[WAITED])} and waited for ${bar[CAUSE]}`);
      if (bar[EARLIER]) words.push("belongs to the step before");
      if (bar[END] > this.data.step) words.push("goes on in the next step");
      return words.join("; ");
    }
  }

  const charts = data.panels.map((panel) => new Panel(panel));
  const drawAll = () => charts.forEach((chart) => chart.draw());
  const showMoment = (moment, owner) => {
    for (const chart of charts) {
      chart.moment = moment;
      if (chart !== owner) chart.bar = null;
      chart.show();
    }
  };
  const zoom = (factor, around) => {
    const span = Math.min(data.seconds, Math.max((view.to - view.from) * factor, data.seconds / 2000));
    const share = (around - view.from) / (view.to - view.from);
    view.from = Math.min(Math.max(around - share * span, 0), data.seconds - span);
    view.to = view.from + span;
    drawAll();
  };
  const pan = (seconds) => {
    const span = view.to - view.from;
    view.from = Math.min(Math.max(view.from + seconds, 0), data.seconds - span);
    view.to = view.from + span;
    drawAll();
  };
  for (const chart of charts) {
    let held = null;
    chart.svg.addEventListener("pointerdown", (event) => { held = event.clientX; });
    chart.svg.addEventListener("pointermove", (event) => {
      if (held === null || !event.buttons || view.to - view.from >= data.seconds) return;
      pan((held - event.clientX) / (chart.width - LEFT - RIGHT) * (view.to - view.from));
      held = event.clientX;
    });
    addEventListener("pointerup", () => { held = null; });
    chart.svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;  // a plain wheel scrolls the page; with Ctrl, or two fingers, it zooms
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, chart.seconds(event.clientX - chart.svg.getBoundingClientRect().left));
    }, { passive: false });
  }
  const button = (label, name, action) => {
    const node = html("button", { type: "button", "aria-label": name }, label);
    node.addEventListener("click", action);
    return node;
  };
  const middle = () => (view.from + view.to) / 2;
  document.getElementById("charts").append(
    html("div", { class: "tools" },
      button("−", "zoom out", () => zoom(2, middle())),
      button("+", "zoom in", () => zoom(0.5, middle())),
      button("whole step", "show the whole step", () => zoom(Infinity, 0)),
      html("span", { class: "note" }, "Point at the picture, or focus it and use the arrow keys. Drag to move when zoomed.")),
    ...charts.map((chart) => chart.node));
  drawAll();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
})();
