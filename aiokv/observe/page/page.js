// The live page: requests the state once per second while it is visible, and draws it.
// Texts of the server are only ever set as textContent.

const PERIOD_MS = 1000;
const SPAN_SECONDS = 30;      // of the timeline
const HISTORY_SECONDS = 600;  // of the charts; the server samples each second
const GAP_SECONDS = 5;        // a longer time without a sample interrupts a line
const RATE_SECONDS = 10;      // over which rates are averaged

const byId = id => document.getElementById(id);
const state = { name: "", after: -1, histories: new Map(), timer: 0, busy: false, hits: [], ago: null, data: null };

// ---- numbers -----------------------------------------------------------------------------------

const number = value => Math.round(value).toLocaleString("en-US");
const percent = share => share === null ? "–" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

function short(value) {
  const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]];
  for (const [size, unit] of units) {
    if (value >= size) return `${(value / (unit === "k" ? 1e3 : size)).toPrecision(3)} ${unit}`;
  }
  return number(value);
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit++; }
  return `${unit ? value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0) : Math.round(value)} ${units[unit]}`;
}

function seconds(value) {
  if (!value) return "–";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  if (value < 6000) return `${(value / 60).toFixed(0)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

// ---- elements ----------------------------------------------------------------------------------

function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function replace(id, children, whenEmpty = "") {
  const target = byId(id);
  if (children.length) return target.replaceChildren(...children);
  const cell = element(target.tagName === "TBODY" ? "td" : "div", "empty", whenEmpty);
  if (cell.tagName === "TD") cell.colSpan = 20;
  target.replaceChildren(target.tagName === "TBODY" ? element("tr", "", cell) : cell);
}

// A bar of [class name, amount, title] parts, on a scale that ends at `total`.
function bar(parts, total) {
  const made = element("div", "bar");
  for (const [name, amount, title] of parts) {
    if (amount <= 0) continue;
    const part = element("i", name);
    part.style.width = `${100 * amount / Math.max(total, 1)}%`;
    if (title) part.title = title;
    made.append(part);
  }
  return made;
}

// A row of [class name, content, title] cells. Narrow windows show the head of its column in each.
function row(id, cells) {
  const heads = byId(id).closest("table").tHead.rows[0].cells;
  return element("tr", "", ...cells.map(([name, content, title], place) => {
    const cell = element("td", name, content);
    cell.dataset.head = heads[place].textContent;
    if (title) cell.title = title;
    return cell;
  }));
}

// ---- history and rates -------------------------------------------------------------------------

function remember(name, engine, time) {
  const { columns, rows } = engine.history;
  const fresh = rows.map(row => Object.fromEntries(columns.map((column, i) => [column, row[i]])));
  let history = state.histories.get(name);
  const last = history?.samples.at(-1);
  if (!history || (last && fresh.some(sample => sample.prompt_tokens < last.prompt_tokens))) {
    history = { samples: [], transfers: new Map() };  // of another engine, as after a restart
    state.histories.set(name, history);
  }
  const known = history.samples.at(-1)?.time_seconds ?? 0;
  // Times may differ by some microseconds between two answers.
  history.samples.push(...fresh.filter(sample => sample.time_seconds > known + 0.01));
  while (history.samples.length && history.samples[0].time_seconds < time - HISTORY_SECONDS - RATE_SECONDS) {
    history.samples.shift();
  }
  for (const transfer of engine.transfers) history.transfers.set(transfer.transfer_id, transfer);
  for (const [id, transfer] of history.transfers) {
    const isOver = transfer.outcome === "open"
      ? !engine.transfers.some(other => other.transfer_id === id)
      : transfer.ended_seconds < time - SPAN_SECONDS - 1;
    if (isOver) history.transfers.delete(id);
  }
  history.points = pointsOf(history.samples);
  return history;
}

// The figures of the charts at each sample. Rates are those of the RATE_SECONDS before it.
function pointsOf(samples) {
  let first = 0;
  return samples.map(sample => {
    while (samples[first].time_seconds < sample.time_seconds - RATE_SECONDS - 0.5) first++;
    const elapsed = sample.time_seconds - samples[first].time_seconds;
    const gained = column => sample[column] - samples[first][column];
    const rate = column => elapsed > 0 ? gained(column) / elapsed : null;
    return {
      time: sample.time_seconds, ...hitShares(gained), tokens: rate("prompt_tokens"),
      moved: rate("moved_bytes"), running: sample.leases - sample.waiting, waiting: sample.waiting,
    };
  });
}

// hit_store_tokens is a part of the hits of device and host: fetched blocks arrive in host memory.
function hitShares(gained) {
  const prompt = gained("prompt_tokens");
  if (!prompt) return { device: null, host: null, store: null, all: null };
  const store = gained("hit_store_tokens"), host = gained("hit_host_tokens");
  const device = gained("hit_device_tokens");
  return {
    device: (device - Math.max(store - host, 0)) / prompt,
    host: Math.max(host - store, 0) / prompt,
    store: store / prompt,
    all: (device + host) / prompt,
  };
}

// ---- parts of the page -------------------------------------------------------------------------

function drawTiles(engine, history) {
  const s = engine.statistics;
  const { all, tokens, moved } = history.points.at(-1) ?? { all: null, tokens: null, moved: null };
  const sinceStart = s.prompt_tokens ? (s.hit_device_tokens + s.hit_host_tokens) / s.prompt_tokens : null;
  const tiles = [
    [percent(all), `hit rate; ${percent(sinceStart)} since start`],
    [tokens === null ? "–" : short(tokens), "prompt tokens/s"],
    [number(s.leases), `leases; ${number(s.grants)} grants`],
    [number(waiting(s)), "waiting leases"],
    [moved === null ? "–" : `${bytes(moved)}/s`, "moved between tiers"],
    [seconds(s.poller.latency_p50_seconds), `wake-up p50; p99 ${seconds(s.poller.latency_p99_seconds)}`],
  ];
  replace("tiles", tiles.map(([value, label]) =>
    element("div", "tile", element("b", "", value), element("span", "", label))));
}

const waiting = s => s.waiting + s.waiting_for_quota + s.waiting_for_store + s.waiting_for_pending;

// Blocks, and their bytes if the size of a block is known.
const sized = (blocks, size) => size > 0 && blocks ? `${number(blocks)} · ${bytes(blocks * size)}` : number(blocks);

function tier(name, pool, size, cached, notes) {
  const parts = [[cached.color, pool.cached, cached.name], ["leased", pool.leased, "leased"],
    ["flight", pool.in_flight, "in flight"], ["free", pool.free, "free"]];
  const legend = element("div", "legend");
  for (const [className, amount, label] of parts) {
    if (amount || label === cached.name || label === "free") {
      legend.append(element("span", "", element("i", className), `${label} ${sized(amount, size)}`));
    }
  }
  legend.append(...notes.map(note => element("span", "", note)));
  const titled = parts.map(([className, amount, label]) => [className, amount, `${label}: ${sized(amount, size)}`]);
  const total = element("small", "", sized(pool.blocks, size));
  return element("div", "tier", element("span", "", `${name} `, total), bar(titled, pool.blocks), legend);
}

const NOTES = { attention: [], state: ["slots of recurrent state"] };

function drawTiers(engine) {
  const s = engine.statistics, asleep = engine.health.asleep;
  const tiers = [];
  for (const [group, pools] of Object.entries(s.groups)) {
    for (const place of ["device", "host"]) {
      const pool = pools[place];
      if (!pool.blocks && (group !== "attention" || place === "host")) continue;
      const evicted = Object.values(pool.evicted_by_cause).reduce((sum, count) => sum + count, 0);
      const notes = [...NOTES[group] ?? ["sliding window"],
        asleep.includes(place) ? "asleep" : `${number(evicted)} evicted since start`];
      const name = group === "attention" ? place : place === "host" ? `${group}, host` : group;
      const cached = { color: `cached-${place}`, name: group === "state" ? "snapshots" : "cached" };
      tiers.push(tier(name, pool, s.worker.block_sizes[group]?.[place], cached, notes));
    }
  }
  replace("tiers", tiers);
  byId("tiers-note").textContent = `blocks of ${engine.config.block_tokens} tokens; ${number(s.nodes)} blocks in the index`;
}

// ---- charts of ten minutes ---------------------------------------------------------------------

const CHARTS = [
  { id: "hits", format: percent, most: 1, isStacked: true, series: [["device", "device"], ["host", "host"], ["store", "store"]] },
  { id: "prompts", format: value => value === null ? "–" : short(value), series: [["tokens", "device", "tokens/s"]] },
  { id: "moved", format: value => value === null ? "–" : `${bytes(value)}/s`, base: 2, series: [["moved", "host", "bytes"]] },
  { id: "load", format: number, series: [["running", "device"], ["waiting", "warn"]] },
];

const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes, color) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (color) made.style.setProperty("--color", `var(--${color})`);
  return made;
}

// The elements of a chart, made once; returns those that change.
function chartOf(id) {
  const card = byId(id);
  if (!card.querySelector(".plot")) {
    const svg = shape("svg", { viewBox: `0 0 ${HISTORY_SECONDS} 100`, preserveAspectRatio: "none" });
    const plot = element("div", "plot", svg, element("span", "most"), element("i", "cursor"));
    const axis = element("div", "axis", ...["−10 min", "−5 min", "now"].map(text => element("span", "", text)));
    card.append(element("div", "legend"), plot, axis);
    plot.addEventListener("pointermove", event => {
      const box = plot.getBoundingClientRect();
      pointAt(HISTORY_SECONDS * (1 - (event.clientX - box.left) / box.width));
    });
    plot.addEventListener("pointerleave", () => pointAt(null));
  }
  return Object.fromEntries([".legend", "svg", ".most", ".cursor"].map(name =>
    [name.replace(".", ""), card.querySelector(`.chart > ${name}, .plot > ${name}`)]));
}

// All charts show the figures of the same time.
function pointAt(ago) {
  state.ago = ago;
  const engine = state.data?.engines[state.name];
  if (engine) drawCharts(engine, state.histories.get(state.name), state.data.time_seconds);
}

// The first of 1, 2, 5, 10, ... (or of the powers of two) that is not below a value.
function roundedUp(value, base) {
  const least = Math.max(value, 1);
  if (base === 2) return 2 ** Math.ceil(Math.log2(least));
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find(step => step * power >= least);
}

function drawCharts(engine, history, time) {
  const points = history.points.filter(point => point.time > time - HISTORY_SECONDS);
  const shown = new Set(CHARTS.flatMap(chart => chart.series.map(([key]) => key)));
  if (!engine.statistics.groups.attention.host.blocks) shown.delete("host");
  if (!engine.statistics.stores.length) shown.delete("store");
  const at = state.ago === null ? points.at(-1) : points.findLast(point => point.time <= time - state.ago);
  for (const { id, format, most, base, isStacked, series } of CHARTS) {
    const chart = chartOf(id), keys = series.filter(([key]) => shown.has(key));
    const largest = Math.max(0, ...points.flatMap(point => keys.map(([key]) => point[key] ?? 0)));
    const top = most ?? roundedUp(largest, base);
    const y = value => 99 - 97 * value / top;
    const grounds = points.map(() => 0);
    const shapes = keys.map(([key, color]) => {
      const areas = [], lines = [];
      let run = [];
      const end = () => {
        if (!run.length) return;
        const upper = run.map(([x, ground, value]) => `${x},${y(ground + value)}`);
        const lower = run.map(([x, ground]) => `${x},${y(ground)}`).reverse();
        areas.push(shape("polygon", { points: [...upper, ...lower].join(" ") }, color));
        lines.push(shape("polyline", { points: upper.join(" ") }, color));
        run = [];
      };
      points.forEach((point, i) => {
        const isGap = point[key] === null || (i && point.time - points[i - 1].time > GAP_SECONDS);
        if (isGap) end();
        if (point[key] === null) return;
        run.push([(HISTORY_SECONDS - time + point.time).toFixed(2), grounds[i], point[key]]);
        if (isStacked) grounds[i] += point[key];
      });
      end();
      return [...areas, ...lines];
    }).reverse().flat();  // the first series is drawn last
    chart.svg.replaceChildren(shape("line", { x1: 0, x2: HISTORY_SECONDS, y1: 99.5, y2: 99.5 }), ...shapes);
    chart.most.textContent = format(top);
    chart.cursor.hidden = state.ago === null;
    if (state.ago !== null) chart.cursor.style.left = `${100 * (1 - state.ago / HISTORY_SECONDS)}%`;
    chart.legend.replaceChildren(...keys.map(([key, color, label]) => {
      const mark = element("i");
      mark.style.background = `var(--${color})`;
      return element("span", "", mark, `${label ?? key} `, element("b", "", at ? format(at[key]) : "–"));
    }), ...(state.ago === null ? [] : [element("span", "", `${seconds(Math.max(state.ago, 1))} ago`)]));
  }
}

const FAMILY = route => /fetch|save/.test(route) ? "--store" : /offload/.test(route) ? "--host"
  : /onload/.test(route) ? "--device" : "--flight";

const directionOf = t => t.group === "attention" ? t.route : `${t.group} ${t.route}`;

// The routes of full attention first, from the device downwards; then those of other groups.
const ROUTES = ["onload", "offload", "fetch", "save", "receive", "send"];
const inOrder = (a, b) => (ROUTES.indexOf(a) + 1 || 99) - (ROUTES.indexOf(b) + 1 || 99) || (a < b ? -1 : 1);

function drawTimeline(history, time) {
  const canvas = byId("timeline"), transfers = [...history.transfers.values()];
  const routes = [...new Set(transfers.map(directionOf))].sort(inOrder);
  const rowHeight = 20, bottom = 18;
  const width = canvas.clientWidth, height = Math.max(routes.length, 1) * rowHeight + bottom;
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const style = getComputedStyle(document.documentElement);
  const color = name => style.getPropertyValue(name);
  const draw = canvas.getContext("2d");
  draw.scale(scale, scale);
  draw.font = "12px system-ui, sans-serif";
  const left = 12 + Math.max(50, ...routes.map(route => draw.measureText(route).width));
  const step = width - left < 600 ? 10 : 5;
  const x = at => left + (width - left) * (1 - (time - at) / SPAN_SECONDS);
  draw.textBaseline = "middle";
  for (let ago = SPAN_SECONDS; ago >= 0; ago -= step) {
    draw.fillStyle = color("--line");
    draw.fillRect(Math.min(x(time - ago), width - 1), 0, 1, height - bottom);
    draw.fillStyle = color("--soft");
    draw.textAlign = ago === SPAN_SECONDS ? "left" : ago ? "center" : "right";
    draw.fillText(ago ? `−${ago} s` : "now", x(time - ago), height - bottom / 2);
  }
  draw.textAlign = "left";
  state.hits = [];
  routes.forEach((route, row) => {
    draw.fillStyle = color("--soft");
    draw.fillText(route, 0, row * rowHeight + rowHeight / 2);
  });
  for (const transfer of transfers) {
    const row = routes.indexOf(directionOf(transfer)), top = row * rowHeight + 3;
    const end = transfer.outcome === "open" ? time : transfer.ended_seconds;
    const begin = transfer.started_seconds ?? transfer.queued_seconds;
    const from = Math.max(x(begin), left), queued = Math.max(x(transfer.queued_seconds), left);
    const until = Math.min(Math.max(x(end), from + 2), width);
    if (until <= left) continue;
    draw.fillStyle = color(transfer.outcome === "failed" ? "--bad" : FAMILY(transfer.route));
    draw.globalAlpha = 0.3;
    draw.fillRect(queued, top + 5, Math.max(from - queued, 0), rowHeight - 16);
    draw.globalAlpha = transfer.outcome === "cancelled" ? 0.35 : 0.85;
    draw.fillRect(from, top, until - from, rowHeight - 6);
    draw.globalAlpha = 1;
    state.hits.push({ from: Math.min(queued, from) - 2, until: until + 2, row, transfer });
  }
  if (!routes.length) {
    draw.fillStyle = color("--soft");
    draw.fillText("no transfers", 0, rowHeight / 2);
  }
  state.rowHeight = rowHeight;
  const failed = transfers.filter(transfer => transfer.outcome === "failed").length;
  byId("transfers-note").textContent =
    `last ${SPAN_SECONDS} s; ${number(transfers.length)} transfers${failed ? `, ${failed} failed` : ""}`;
}

function showTip(event) {
  const tip = byId("tip"), box = byId("timeline").getBoundingClientRect();
  const x = event.clientX - box.left, row = Math.floor((event.clientY - box.top) / state.rowHeight);
  const hit = state.hits.findLast(hit => hit.row === row && hit.from <= x && x <= hit.until);
  tip.hidden = !hit;
  if (!hit) return;
  const t = hit.transfer, begin = t.started_seconds ?? t.queued_seconds;
  tip.textContent = `${directionOf(t)} ${t.transfer_id}: ${t.outcome === "open" ? "in flight" : t.outcome}\n`
    + `${number(t.blocks)} blocks, ${bytes(t.num_bytes)}\n`
    + `queued ${seconds(begin - t.queued_seconds)}, moved ${seconds(t.ended_seconds - begin)}`
    + (t.reason ? `\n${t.reason}` : "");
  tip.style.left = `${Math.max(Math.min(event.clientX + 12, window.innerWidth - 260), 4)}px`;
  tip.style.top = `${event.clientY + 14}px`;
}

function leaseRow(id, lease, state, more, size) {
  const positions = Math.max(lease.num_tokens, lease.prompt_tokens);
  const cached = Math.min(lease.cached_tokens, positions);
  const own = Math.max(lease.computed_tokens - cached, 0);
  const progress = bar([
    ["cached-device", cached, `cached: ${number(cached)} tokens`],
    ["leased", own, `computed: ${number(own)} tokens`],
  ], positions);
  return row(id, [
    ["owner", lease.owner, lease.owner], state, ["num prompt", number(lease.prompt_tokens)],
    ["progress", progress], ...more, ["num age", seconds(lease.age_seconds)],
  ]);
}

function drawLeases(engine) {
  const inLine = new Set(engine.waiting.map(lease => lease.lease_id));
  const running = engine.leases.filter(lease => !inLine.has(lease.lease_id));
  const size = engine.statistics.worker.block_sizes.attention?.device;
  replace("running", running.map(lease => leaseRow("running", lease,
    lease.waits_for ? ["state waits", lease.waits_for] : [`state state-${lease.state}`, lease.state],
    [["num blocks", number(lease.blocks), sized(lease.blocks, size)]])), "no leases");
  replace("waiting", engine.waiting.map(lease => leaseRow("waiting", lease, ["state waits", lease.waits_for], [])), "");
  byId("waiting-list").hidden = !engine.waiting.length;
  const waits = waiting(engine.statistics), others = engine.statistics.leases - waits;
  const listed = (some, all) => some < all ? `; the first ${number(some)} are listed` : "";
  byId("running-note").textContent = number(others) + (running.length < others ? `; the oldest ${number(running.length)} are listed` : "");
  byId("waiting-note").textContent = number(waits) + listed(engine.waiting.length, waits);
}

function drawPrefixes(engine) {
  const { prefixes } = engine;
  const most = Math.max(...prefixes.map(prefix => prefix.uses), 1);
  const depth = [], children = new Map([[null, []]]);
  prefixes.forEach((prefix, place) => {
    children.set(place, []);
    children.get(prefix.parent).push(place);
    depth[place] = prefix.parent === null ? 0 : depth[prefix.parent] + 1;
  });
  const rows = [];
  const visit = place => {
    const prefix = prefixes[place];
    const last = prefix.first_token + prefix.num_tokens;
    const names = [prefix.salt && `salt ${prefix.salt}`, prefix.adapter && `adapter ${prefix.adapter}`];
    const name = element("span", "name", `${number(prefix.first_token)}–${number(last)}`);
    if (prefix.parent === null) name.append(...names.filter(Boolean).map(text => ` · ${text}`));
    const more = prefix.branches - children.get(place).length;
    const details = [prefix.leases && `${prefix.leases} in use`, more > 0 && `+${number(more)} more`];
    name.append(element("small", "", ...details.filter(Boolean).map(text => ` · ${text}`)));
    name.style.paddingLeft = `${12 * depth[place]}px`;
    name.title = `tokens ${prefix.first_token} to ${last}, ${prefix.blocks} blocks: `
      + `${prefix.device_blocks} on the device, ${prefix.host_blocks} in host memory; block #${prefix.prefix_id}`;
    const both = prefix.blocks - prefix.device_blocks;
    const share = prefix.uses / most / prefix.blocks;
    const split = bar([
      ["cached-device", prefix.device_blocks * share, "on the device"],
      ["cached-host", both * share, "in host memory only"],
    ], 1);
    rows.push(element("div", "prefix", name, split,
      element("span", "num", prefix.uses === 255 ? "255+" : number(prefix.uses))));
    children.get(place).forEach(visit);
  };
  children.get(null).forEach(visit);
  replace("prefixes", rows, "nothing is cached");
  byId("prefixes-note").textContent = "token positions, and uses"
    + (engine.prefixes_complete ? "" : "; partial search");
}

const sizeOf = ({ used_bytes: used, capacity_bytes: capacity }) =>
  used < 0 ? "–" : capacity < 0 ? bytes(used) : `${bytes(used)} of ${bytes(capacity)}`;

function drawStores(engine) {
  const card = byId("stores-card"), { stores } = engine.statistics;
  card.hidden = !stores.length;
  replace("stores", stores.map(store => {
    const where = store.group === "attention" ? store.url : `${store.url} (${store.group})`;
    const name = store.rank === null ? where : `rank ${store.rank}: ${where}`;
    const failures = store.failed_blocks + store.wrong_blocks + store.timeouts;
    const cells = [
      ["", name], [`dot ${store.reading}`, store.reading], [`dot ${store.saving}`, store.saving],
      ["num", store.lookup_keys ? percent(store.found_keys / store.lookup_keys) : "–"],
      ["num", `${number(store.loaded_blocks)} · ${bytes(store.loaded_bytes)}`],
      ["num", `${number(store.saved_blocks)} · ${bytes(store.saved_bytes)}`],
      ["num", sizeOf(store.store)], ["num", number(failures)], ["num", seconds(store.lookup_seconds)],
      ["num", store.load_bytes_per_second ? `${bytes(store.load_bytes_per_second)}/s` : seconds(store.load_seconds)],
      ["num", store.save_bytes_per_second ? `${bytes(store.save_bytes_per_second)}/s` : seconds(store.save_seconds)],
    ];
    return row("stores", cells);
  }));
  const open = stores.filter(store => store.reading !== "closed" && store.reading !== "off").length;
  byId("stores-note").textContent = "dots: state of the breaker" + (open ? `; ${open} unavailable` : "");
}

function drawPeers(engine) {
  const { peers } = engine.statistics;
  byId("peers-card").hidden = !peers.ranks.length;
  replace("peers", peers.ranks.map(({ rank, received, sent, ...own }) => {
    const cells = [
      ["", rank === null ? "–" : number(rank)], ["num", number(received.tickets)],
      ["num", `${number(received.fragments)} · ${bytes(received.received_bytes)}`],
      ["num", number(received.wrong + received.stale + received.dropped)],
      ["num", `${number(own.free_slots)} of ${number(own.landing_slots)}`],
      ["num", number(sent.tickets)], ["num", `${number(sent.fragments)} · ${bytes(sent.sent_bytes)}`],
      ["num", number(sent.retries)], ["num", number(sent.waits)], ["num", number(own.connections)],
    ];
    return row("peers", cells);
  }));
  byId("peers-note").textContent = `received ${number(peers.received_tokens)} of ${number(peers.wanted_tokens)} `
    + `tokens; delivered ${number(peers.delivered_tokens)}`;
}

function drawHeader(data) {
  const names = Object.keys(data.engines);
  if (!names.includes(state.name)) state.name = names[0] ?? "";
  const nav = byId("engines");
  nav.hidden = names.length < 2;
  nav.replaceChildren(...names.map(name => {
    const button = element("button", "", name);
    button.setAttribute("aria-current", name === state.name);
    button.addEventListener("click", () => { state.name = name; ask(); });
    return button;
  }));
  const engine = data.engines[state.name], pill = byId("ready");
  const failed = Object.values(data.failed[state.name] ?? { engine: "no engine" });
  const paused = engine && engine.health.is_paused ? ", paused" : "";
  pill.textContent = failed.length ? failed.join("; ") : `ready${paused}`;
  pill.className = `pill ${failed.length ? "bad" : "good"}`;
  byId("clock").textContent = new Date(1000 * data.time_seconds).toLocaleTimeString();
  return engine;
}

function draw(data) {
  document.body.classList.remove("stale");
  state.data = data;
  const engine = drawHeader(data);
  let shown = null;
  for (const [name, each] of Object.entries(data.engines)) {
    const history = remember(name, each, data.time_seconds);
    if (name === state.name) shown = history;
  }
  if (!engine) return;
  drawTiles(engine, shown);
  drawTiers(engine);
  drawCharts(engine, shown, data.time_seconds);
  drawTimeline(shown, data.time_seconds);
  drawLeases(engine);
  drawPrefixes(engine);
  drawStores(engine);
  drawPeers(engine);
}

// ---- the loop ----------------------------------------------------------------------------------

function showLost(reason) {
  state.after = -1;  // the next server may have another clock
  document.body.classList.add("stale");
  const pill = byId("ready");
  pill.textContent = reason;
  pill.className = "pill bad";
}

async function ask() {
  if (state.busy) return;
  state.busy = true;
  try {
    const answer = await fetch(`live?after=${state.after}`, { signal: AbortSignal.timeout(5000) });
    if (answer.ok) {
      const data = await answer.json();
      state.after = data.after;
      draw(data);
    } else {
      showLost((await answer.text()).trim());
    }
  } catch (error) {
    if (!(error instanceof TypeError) && error.name !== "TimeoutError" && error.name !== "AbortError") throw error;
    showLost("no answer from the server");
  } finally {
    state.busy = false;
  }
}

function run() {
  clearInterval(state.timer);
  if (document.visibilityState !== "visible") return;
  ask();
  state.timer = setInterval(ask, PERIOD_MS);
}

document.addEventListener("visibilitychange", run);
byId("timeline").addEventListener("pointermove", showTip);
byId("timeline").addEventListener("pointerdown", showTip);
byId("timeline").addEventListener("pointerleave", () => { byId("tip").hidden = true; });
run();
