// Keeps a page of runs fresh: asks for facts every two seconds, and puts texts into the places that the server has made.
"use strict";

(() => {
  const EVERY = 2000, SLOWEST = 30000, AWAY = 300;
  const main = document.querySelector("main"), offline = document.getElementById("offline");
  const get = (id) => document.getElementById(id);
  const api = document.body.dataset.api;

  // --- texts and rows

  function put(place, value) {
    const shown = value === undefined || value === null ? "" : value;
    if (place.tagName === "PROGRESS") {
      place.hidden = shown === "";
      place.value = Number(shown) || 0;
      return;
    }
    const text = String(shown);
    if (place.textContent !== text) place.textContent = text;
    if (place.tagName !== "TH") place.hidden = text === "";
  }

  function fill(element, values, isOwn) {
    for (const place of element.querySelectorAll("[data-f]")) {
      if (!isOwn(place)) continue;
      put(place, values[place.dataset.f]);
      const address = place.dataset.href && values[place.dataset.href];
      if (address) place.setAttribute("href", address);
      else if (place.dataset.href) place.removeAttribute("href");
      if (place.dataset.title) place.title = values[place.dataset.title] || "";
    }
    for (const place of element.querySelectorAll("[data-if]")) if (isOwn(place)) place.hidden = !values[place.dataset.if];
  }

  function list(holder, rows) {
    const template = holder.querySelector(":scope > template"), known = new Map();
    for (const row of holder.querySelectorAll(":scope > [data-key]")) known.set(row.dataset.key, row);
    let before = holder.firstElementChild;
    for (const cells of rows) {
      let row = known.get(cells.key);
      known.delete(cells.key);
      if (!row) {
        row = template.content.firstElementChild.cloneNode(true);
        row.dataset.key = cells.key;
      }
      while (before && before !== row && known.has(before.dataset.key) && !rows.some((one) => one.key === before.dataset.key)) {
        const gone = before;
        before = before.nextElementSibling;
        known.delete(gone.dataset.key);
        gone.remove();
      }
      if (before === row) before = row.nextElementSibling;
      else holder.insertBefore(row, before);
      if (cells.state !== undefined) row.dataset.state = cells.state;
      fill(row, cells, () => true);
      for (const button of row.querySelectorAll("[data-copy]")) button.hidden = !navigator.clipboard;
    }
    for (const row of known.values()) row.remove();
  }

  function show(data) {
    fill(main, data.values, (place) => !place.closest("[data-key]"));
    const head = main.querySelector(".head");
    if (head) head.dataset.state = data.values.state;
    for (const holder of main.querySelectorAll("[data-list]")) list(holder, data.lists[holder.dataset.list] || []);
    for (const part of main.querySelectorAll("[data-has]")) part.hidden = !(data.lists[part.dataset.has] || []).length;
    if (get("output")) showLog(data);
    if (data.curves) curves.show(data.curves);
    if (data.mark) mark = data.mark;
    const isFirst = Boolean(main.querySelector(".first"));
    if (data.values.first !== undefined && isFirst !== Boolean(data.values.first)) location.reload();
  }

  // --- the log: follows while its end is seen, and rests while something in it is selected

  function showLog(data) {
    const output = get("output"), select = get("ranks").elements.rank, selected = document.getSelection();
    const ranks = data.ranks.length ? data.ranks : [0];
    if (ranks.join() !== Array.from(select.options, (one) => Number(one.text)).join()) {
      const chosen = select.value;
      select.replaceChildren(...ranks.map((rank) => new Option(String(rank), String(rank), false, String(rank) === chosen)));
    }
    const text = data.values.log;
    if (!text || output.textContent === text || Number(select.value) !== data.rank) return;
    if (!selected.isCollapsed && output.contains(selected.anchorNode)) return;
    const isAtEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 20;
    output.textContent = text;
    if (isAtEnd) output.scrollTop = output.scrollHeight;
  }

  // --- asking

  let wait = EVERY, timer = 0, mark = "", asking = false;

  function address() {
    const query = new URLSearchParams(location.search);
    if (mark) query.set("mark", mark);
    if (get("ranks")) query.set("rank", get("ranks").elements.rank.value);
    else query.set("since", String(Math.floor(since)));
    return `${api}?${query}`;
  }

  async function ask() {
    clearTimeout(timer);
    if (document.hidden || asking || !api) return;
    asking = true;
    try {
      const answer = await fetch(address(), { headers: { Accept: "application/json" }, signal: AbortSignal.timeout(20000) });
      if (answer.status === 403) return location.reload(); // the login is over
      if (!answer.ok) throw new Error(String(answer.status));
      show(await answer.json());
      offline.hidden = true;
      wait = EVERY;
      seen();
    } catch {
      offline.hidden = false;
      wait = Math.min(wait * 2, SLOWEST);
    } finally {
      asking = false;
      timer = setTimeout(ask, wait);
    }
  }

  // --- the last visit: a time in this browser

  let since = 0;

  function store(key, value) {
    try {
      if (value !== undefined) localStorage.setItem(key, String(value));
      return Number(localStorage.getItem(key)) || 0;
    } catch {
      return 0;
    }
  }

  function arrive() {
    const last = store("train-seen"), now = Date.now() / 1000;
    if (last && now - last > AWAY) store("train-since", last);
    since = store("train-since");
  }

  const seen = () => store("train-seen", Date.now() / 1000);

  // --- curves

  const curves = (() => {
    const panels = new Map(), controls = get("controls");
    const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]], SIGNS = ["\u2500\u2500", "- -", "\u00b7\u00b7\u00b7", "\u2500\u00b7"], COLOURS = ["--line", "--wait", "--good", "--bad"];
    let runs = [], isOwn = false;
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const number = (value) => (value === null || value === undefined ? "-" : String(Number(value.toPrecision(4))));
    const bytes = (value) => (value === null || value === undefined ? "-" : `${(value / 2 ** 30).toFixed(2)} GiB`);
    const seconds = (value) => {
      if (value === null || value === undefined) return "-";
      return value < 90 ? `${Math.round(value * 10) / 10} s` : value < 5400 ? `${Math.round(value / 6) / 10} min` : `${Math.round(value / 360) / 10} h`;
    };

    function tables(kind, name) {
      const isTime = controls.elements.axis.value === "time", isLog = controls.elements.log.checked;
      const found = runs.filter((run) => run[kind].figures[name]);
      const all = found.map((run) => {
        const across = isTime ? run[kind].time : run[kind].step, last = new Map();
        run[kind].figures[name].forEach((value, place) => last.set(across[place], isLog && value <= 0 ? null : value));
        const sorted = [...last.keys()].sort((one, other) => one - other);
        return [sorted, sorted.map((at) => last.get(at))];
      });
      return { found, data: all.length > 1 ? uPlot.join(all) : all[0] };
    }

    function marks(plot) {
      const isTime = controls.elements.axis.value === "time", context = plot.ctx;
      let said = -Infinity;
      context.save();
      context.textAlign = "left";
      context.strokeStyle = context.fillStyle = colour("--wait");
      context.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
      for (const run of runs) {
        for (const [step, hasDied] of run.marks) {
          const place = run.line.step.findLastIndex((one) => one <= step);
          const at = isTime ? (place < 0 ? 0 : run.line.time[place]) : step;
          if (at < plot.scales.x.min || at > plot.scales.x.max) continue;
          const x = Math.round(plot.valToPos(at, "x", true));
          context.beginPath();
          context.moveTo(x, plot.bbox.top);
          context.lineTo(x, plot.bbox.top + plot.bbox.height);
          context.stroke();
          if (x - said < 70 * devicePixelRatio) continue; // no text over another one
          context.fillText(hasDied ? get("panels").dataset.restart : get("panels").dataset.resume, x + 4, plot.bbox.top + 12 * devicePixelRatio);
          said = x;
        }
      }
      context.restore();
    }

    function make(holder, kind, name) {
      const { found, data } = tables(kind, name), figure = document.createElement("figure");
      const title = kind === "eval" ? `eval ${name}` : name, caption = document.createElement("figcaption"), value = document.createElement("span");
      const format = name === "memory" ? bytes : number, isTime = controls.elements.axis.value === "time";
      caption.append(title, value);
      value.className = "soft";
      figure.append(caption);
      figure.setAttribute("aria-label", title);
      holder.append(figure);
      const axis = (more) => ({ stroke: colour("--soft"), grid: { stroke: colour("--edge"), width: 1 }, ticks: { stroke: colour("--edge"), width: 1 }, ...more });
      const plot = new uPlot({
        width: Math.max(figure.clientWidth, 200), height: 220,
        legend: { show: found.length > 1, live: false },
        cursor: { sync: { key: "page", setSeries: false }, drag: { x: true, y: false }, points: { size: 6 } },
        scales: { x: { time: false }, y: controls.elements.log.checked ? { distr: 3 } : {} },
        axes: [
          axis({ values: (_, all) => all.map(isTime ? seconds : number), space: 70 }),
          axis({ values: (_, all) => all.map((one) => (one === null ? "" : format(one))), size: name === "memory" ? 78 : 62 }),
        ],
        series: [
          { label: isTime ? "time" : "step", value: (_, at) => (isTime ? seconds(at) : number(at)) },
          ...found.map((run) => {
            const place = runs.indexOf(run), dash = (place + Math.floor(place / COLOURS.length)) % DASHES.length;
            return {
              label: `${SIGNS[dash]} ${run.name}`, stroke: colour(COLOURS[place % COLOURS.length]), width: 1.6, spanGaps: true, value: (_, at) => format(at),
              dash: DASHES[dash], points: kind === "eval" || data[0].length < 20 ? {} : { show: false },
            };
          }),
        ],
        hooks: {
          draw: [marks],
          setSelect: [(one) => { if (one.select.width > 0) own(true); }],
          setCursor: [(one) => tell(one)],
        },
      }, data, figure);
      function tell(one) {
        const at = one.cursor.idx, where = at ?? one.data[0].length - 1;
        const across = isTime ? seconds(one.data[0][where]) : number(one.data[0][where]);
        const values = one.data.slice(1).map((all) => format(at === null || at === undefined ? all.findLast((one) => one !== null && one !== undefined) : all[where]));
        value.textContent = values.join(" / ") + (at === null || at === undefined ? "" : ` · ${across}`);
      }
      plot.over.addEventListener("dblclick", () => own(false));
      const panel = { plot, figure, kind, name, tell, count: found.length };
      tell(plot);
      return panel;
    }

    function own(is) {
      isOwn = is;
      const select = controls.elements.range;
      if (is) select.value = "own";
      else if (select.value === "own") select.value = "1";
    }

    function extent(data) {
      const first = data[0][0], last = data[0][data[0].length - 1], share = Number(controls.elements.range.value);
      return { min: last - (last - first) * (share || 1), max: last > first ? last : first + 1 };
    }

    function range(plot) {
      if (plot.data[0].length && !isOwn) plot.setScale("x", extent(plot.data));
    }

    function draw(again) {
      const folded = get("folded"), machine = get("panels").dataset.machine.split(" "), wanted = new Set();
      const some = (kind) => [...new Set(runs.flatMap((run) => Object.keys(run[kind].figures)))].map((name) => [kind, name]);
      const isFolded = ([kind, name]) => kind === "line" && machine.includes(name);
      const all = [...some("line"), ...some("eval")];
      folded.hidden = !all.some(isFolded);
      for (const [kind, name] of all) {
        if (isFolded([kind, name]) && !folded.open) continue;
        const key = `${kind} ${name}`, { found, data } = tables(kind, name);
        if (!data || !data[0].length) continue;
        wanted.add(key);
        let panel = panels.get(key);
        if (panel && (again || panel.count !== found.length)) {
          remove(key);
          panel = undefined;
        }
        if (panel) {
          const { min, max } = panel.plot.scales.x;
          panel.plot.setData(data, false);
          if (isOwn) panel.plot.setScale("x", { min, max });
          if (panel.plot.cursor.idx === null || panel.plot.cursor.idx === undefined) panel.tell(panel.plot);
        } else {
          panel = make(get(isFolded([kind, name]) ? "machine-panels" : "panels"), kind, name);
          panels.set(key, panel);
        }
        const made = panel.plot;
        queueMicrotask(() => range(made)); // uPlot draws in a microtask
      }
      for (const key of [...panels.keys()]) if (!wanted.has(key)) remove(key);
      controls.hidden = !panels.size;
      fit(); // a new panel leaves the others less room
      get("svg").hidden = panels.size > 0;
    }

    function remove(key) {
      panels.get(key).plot.destroy();
      panels.get(key).figure.remove();
      panels.delete(key);
    }

    function fit() {
      for (const { plot, figure } of panels.values()) {
        const width = Math.max(figure.clientWidth, 200);
        if (plot.width !== width) plot.setSize({ width, height: 220 });
      }
    }

    if (controls && window.uPlot) {
      controls.addEventListener("submit", (event) => event.preventDefault());
      controls.elements.axis.addEventListener("change", () => { own(false); draw(true); });
      controls.elements.log.addEventListener("change", () => draw(true));
      controls.elements.range.addEventListener("change", () => { isOwn = false; panels.forEach(({ plot }) => range(plot)); });
      get("folded").addEventListener("toggle", () => draw(false));
      window.addEventListener("resize", fit);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
    }

    return {
      show(found) {
        runs = found;
        get("sampled").hidden = !runs.some((run) => run.sampled);
        if (window.uPlot) draw(false);
      },
    };
  })();

  // --- start
  main.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    await navigator.clipboard.writeText(button.closest("tr").querySelector("code").textContent);
    button.textContent = document.body.dataset.copied;
  });
  for (const button of document.querySelectorAll("[data-copy]")) button.hidden = !navigator.clipboard;
  if (get("ranks")) get("ranks").elements.rank.addEventListener("change", () => { get("output").textContent = ""; ask(); });
  if (get("output")) get("output").scrollTop = get("output").scrollHeight;
  if (get("data")) curves.show(JSON.parse(get("data").textContent));
  const here = new URL(location.href);
  if (here.searchParams.has("token")) { // the cookie replaces it, and an address is easily shown to others
    here.searchParams.delete("token");
    history.replaceState(null, "", here);
  }
  arrive();
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    arrive();
    wait = EVERY;
    ask();
  });
  ask();
})();
