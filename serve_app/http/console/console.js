import { Chart } from "./charts.js";

const PERIOD_MS = 1000, GIVE_UP_MS = 5000, ALLOCATION_EVERY_S = 5, WINDOW_S = 900, KEY = "tokenyard-token";
const ROOMY = 24;  // Replicas of a pool up to which each has a card of its own.
const at = (id) => document.getElementById(id);

// Text only ever becomes text: nothing that a server says is read as HTML.
function el(tag, fields, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(fields || {})) made.setAttribute(key, value);
  made.append(...children.filter((one) => one !== null && one !== undefined && one !== ""));
  return made;
}
// What looks as it did stays as it is, with its focus and what is selected in it.
function show(id, ...children) {
  const host = at(id), fresh = el("div", {}, ...children);
  if (host.innerHTML !== fresh.innerHTML) host.replaceChildren(...fresh.childNodes);
}
function say(node, text) { if (node.textContent !== text) node.textContent = text; }
const known = (value) => value !== null && value !== undefined && isFinite(value);
const number = (value, digits = 2) => known(value) ? Number(value).toFixed(digits) : "-";
const count = (value) => Number(value).toLocaleString("en");
const percent = (value, digits = 1) => known(value) ? (100 * value).toFixed(digits) + " %" : "-";
const time = (seconds) => new Date(1000 * seconds).toLocaleTimeString();
const sum = (values) => values.reduce((a, b) => a + b, 0);
const many = (num, noun) => `${count(num)} ${noun}${num === 1 ? "" : "s"}`;
function short(id) {
  const bare = id.replace(/^https?:\/\//, "");
  return bare.length > 22 ? "…" + bare.slice(-20) : bare;
}

const PLACEMENTS = { sed: "shortest expected delay", marginal_delay: "marginal delay", marginal_in_order: "marginal delay in order" };
const ORDERS = { sjf: "short first", wspt: "short prompts first", edf: "earliest deadline first", slack: "least slack first",
  boost: "boost for short", fair: "fair shares", late_last: "late last" };
// `marginal_delay@5:3+sjf@60@2a138a45935b` in words: a placement, an order, their weights; the hash is left out.
function readable(name) {
  const bare = name.replace(/@[0-9a-f]{12}$/, ""), plus = bare.lastIndexOf("+");
  const words = (term, table) => {
    const [base, numbers] = term.split("@");
    const weights = numbers ? numbers.split(":") : [];
    const unit = base === "boost" ? `${weights[0]} s` : `weight${weights.length > 1 ? "s" : ""} ${weights.join(" and ")}`;
    return (table[base] || base.replaceAll("_", " ")) + (weights.length ? ` (${unit})` : "");
  };
  if (plus < 0) return words(bare, PLACEMENTS);
  return `${words(bare.slice(0, plus), PLACEMENTS)}, ${words(bare.slice(plus + 1), ORDERS)}`;
}
const policy = (name, sha256) => el("span", { title: sha256 ? `${name}@${sha256}` : name }, readable(name));

// heads: "#" before a number's column. rows: of texts and nodes.
function table(heads, rows) {
  const names = heads.map((head) => head.replace("#", ""));
  const style = heads.map((head) => head.startsWith("#") ? { class: "number" } : {});
  return el("table", {},
    el("thead", {}, el("tr", {}, ...names.map((name, i) => el("th", { scope: "col", "data-head": name, ...style[i] }, name)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell, i) => el("td", { "data-head": names[i], ...style[i] }, cell))))));
}

// Bins by time, those that were not sent because nothing happened left out.
const bins = new Map();
function keep(fresh, now_s) {
  for (const bin of fresh) bins.set(bin.time_s, bin);
  for (const time_s of bins.keys()) if (time_s < now_s - WINDOW_S) bins.delete(time_s);
}
const charts = Object.fromEntries(["response", "ttft", "ended", "sent", "tokens", "queue"].map((name) => [name, new Chart(`${name}-chart`)]));
function showCharts({ now_s, bin_s }) {
  const first_s = Math.min(...bins.keys()), times = [];
  for (let time_s = first_s; time_s <= now_s; time_s += bin_s) times.push(time_s);
  const all = times.map((time_s) => bins.get(time_s));
  // A rate is zero where nothing happened, and not known yet of the bin that is not over.
  const whole = Math.max(times.length - 2, 0);
  const rate = (of) => all.map((bin, i) => i > whole ? null : bin ? of(bin) / bin_s : 0);
  const draw = (chart, series, newest) => chart.show(times.map((time_s) => Math.min(time_s + bin_s / 2, now_s)), series, now_s, newest);
  for (const kind of ["response", "ttft"])
    draw(charts[kind], ["p50", "p95", "p99"].map((name) => ({ name, values: all.map((bin) => bin?.[`${kind}_s`]?.[name] ?? null) })), times.length - 1);
  draw(charts.ended, [["within SLO", (bin) => bin.kept], ["SLO violated", (bin) => bin.finished - bin.kept - bin.failed],
    ["errors", (bin) => bin.failed], ["refused", (bin) => bin.refused]].map(([name, of]) => ({ name, values: rate(of) })), whole);
  const pools = [...new Set([...bins.values()].flatMap((bin) => Object.keys(bin.sent)))].sort();
  draw(charts.sent, pools.map((name) => ({ name, values: rate((bin) => bin.sent[name] || 0) })), whole);
  draw(charts.tokens, [{ name: "tokens", values: rate((bin) => bin.output_tokens) }], whole);
  draw(charts.queue, [{ name: "waiting", values: all.map((bin) => bin?.queued ?? null) }], times.length - 1);
}

function showNumbers(answer) {
  const last = [...bins.values()].filter((bin) => bin.time_s > answer.now_s - 60);
  const total = (key) => sum(last.map((bin) => bin[key]));
  const covered_s = last.length ? Math.max(answer.now_s - Math.min(...last.map((bin) => bin.time_s)), 1) : 1;
  const finished = total("finished"), kept = total("kept"), failed = total("failed"), refused = total("refused");
  const rows = answer.replicas;
  const ready = rows.filter((row) => row[1] === "ready").length, waiting = sum(rows.map((row) => row[3]));
  const reasons = Object.entries(answer.policies.champion.fallbacks_by_reason);
  const numbers = [
    ["Replicas ready", `${ready} of ${rows.length}`, "", ready < rows.length ? "warn" : ""],
    ["In flight", count(answer.in_flight), `${number(finished / covered_s, 1)} finished per second`],
    ["Waiting", count(waiting + answer.queue.held), `${count(answer.queue.held)} of them at the gateway`],
    ["SLO attainment", finished ? percent(kept / finished) : "-", `${count(kept)} of ${count(finished)}, last minute`, finished && kept / finished < 0.9 ? "bad" : ""],
    ["Output tokens", number(total("output_tokens") / covered_s, 0), "per second, last minute"],
    ["Errors", count(failed), "last minute", failed ? "bad" : ""],
    ["Refused", count(refused), "last minute", refused ? "bad" : ""],
    ["Fallbacks", count(sum(reasons.map(([, num]) => num))), reasons.map(([reason, num]) => `${reason.replaceAll("_", " ")} ${num}`).join(", ") || "the baseline never stood in"],
  ];
  show("numbers", ...numbers.map(([name, value, sub, kind]) => el("div", {}, el("dt", {}, name),
    el("dd", { class: `big ${kind || ""}` }, value), el("dd", { class: "sub" }, sub))));
}

function showTroubles(answer) {
  const found = [], { champion, experiment, registry, state } = answer.policies;
  if (answer.draining) found.push("The gateway ends: it accepts no more requests.");
  if (champion.breaker_open) found.push(`The breaker of ${readable(champion.name)} is open: the baseline decides.`);
  if (experiment?.why_ended && /worse|failed/.test(experiment.why_ended)) found.push(`The last ${experiment.mode} ended: ${experiment.why_ended}`);
  for (const pool of answer.pools) {
    for (const state of ["ejected", "unreachable"]) {
      const those = pool.replicas.filter((row) => row[1] === state);
      if (those.length) found.push(`${pool.name}: ${many(those.length, "replica")} ${state}: ${those.slice(0, 3).map((row) => short(row[0])).join(", ")}${those.length > 3 ? " and others" : ""}`);
    }
    const slower = pool.replicas.filter((row) => row[11]);
    if (slower.length) found.push(`${pool.name}: ${short(slower[0][0])} ${slower[0][11]}${slower.length > 1 ? `, and ${many(slower.length - 1, "other")}` : ""}`);
    for (const [source, why] of Object.entries(pool.problems)) found.push(`${pool.name}, ${source}: ${why}`);
  }
  if (state) found.push(`The state file: ${state}`);
  if (registry && /not|fail|error/i.test(registry)) found.push(`The registry: ${registry}`);
  at("trouble").hidden = !found.length;
  show("troubles", ...found.map((text) => el("li", {}, text)));
}

// Replicas by pool, in the order in which people count.
const order = new Intl.Collator("en", { numeric: true });
function group(answer) {
  const byPool = Object.fromEntries(Object.keys(answer.problems).sort(order.compare).map((name) => [name, []]));
  for (const row of answer.replicas) (byPool[row[12]] ||= []).push(row);
  answer.pools = Object.entries(byPool).map(([name, rows]) => ({ name, problems: answer.problems[name] || {}, replicas: rows.sort((a, b) => order.compare(a[0], b[0])) }));
}

// One group per pool, one button per replica; only what has changed is touched.
const groups = new Map();
const FAILED = new Set(["ejected", "unreachable"]);
let pointed = null;
function describe(row) {
  const [id, state, running, waiting, inFlight, batch, kv, age, sessions, believed, measured, contradiction] = row;
  return [`${id}: ${state}`, `${running} of ${batch} running`, `${waiting} waiting`, `${inFlight} in flight from here`, `KV memory ${percent(kv, 0)}`,
    sessions === null ? null : many(sessions, "session"),
    `an iteration with a full batch takes ${number(believed, 1)} ms as believed${known(measured) ? `, ${number(measured, 1)} ms as measured` : ""}`,
    `last heard of ${number(age, 1)} s ago`, contradiction].filter(Boolean).join("; ");
}
function showTile(tile, row, roomy) {
  tile.row = row;
  const [id, state, running, waiting, , , kv, , sessions, believed, measured] = row;
  const load = waiting ? `${running}+${waiting}` : String(running), seen = [load, state, kv, sessions, believed, measured].join();
  if (tile.seen === seen) return;
  tile.seen = seen;
  tile.className = `tile ${FAILED.has(state) ? "failed" : state === "full" ? "full-up" : state} ${waiting ? "queued" : ""}`;
  tile.style.setProperty("--kv", `${Math.round(100 * (kv || 0))}%`);
  if (!roomy) { say(tile, load); tile.title = `${id}: ${state}, ${load} requests, KV memory ${percent(kv, 0)}`; return; }
  const texts = [short(id), `${running} running, ${waiting} waiting`, "", `KV ${percent(kv, 0)}${sessions === null ? "" : `, ${many(sessions, "session")}`}`,
    `${number(believed, 1)} ms believed${known(measured) ? `, ${number(measured, 1)} measured` : ""}`, state === "ready" ? "" : state];
  while (tile.children.length < texts.length) tile.append(el(tile.children.length ? "span" : "b", {}));
  tile.children[2].className = "bar";
  texts.forEach((text, i) => say(tile.children[i], text));
}
function makeGroup(name) {
  const head = el("h3", {}), about = el("p", { class: "sub" }), tiles = el("div", { class: "tiles", role: "group", "aria-label": `Replicas of pool ${name}` });
  const node = el("div", { class: "pool" }, head, about, tiles);
  const point = (event) => { if (event.target.closest(".tile")) { pointed = event.target.closest(".tile"); showReplica(); } };
  for (const kind of ["pointerover", "focusin", "click"]) tiles.addEventListener(kind, point);
  tiles.addEventListener("focusin", (event) => { for (const one of tiles.children) one.tabIndex = one === event.target ? 0 : -1; });
  tiles.addEventListener("keydown", (event) => {
    const all = [...tiles.children], here = all.indexOf(event.target), wide = getComputedStyle(tiles).gridTemplateColumns.split(" ").length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: wide, ArrowUp: -wide, Home: -here, End: all.length - 1 - here }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    (all[here + step] || all[here]).focus();
  });
  return { node, head, about, tiles, byId: new Map() };
}
function showReplica() {
  if (pointed?.isConnected) say(at("replica"), describe(pointed.row));
}
function showPools({ pools, queue }) {
  const names = pools.map((pool) => pool.name);
  for (const [name, group] of groups) if (!names.includes(name)) { group.node.remove(); groups.delete(name); }
  pools.forEach(({ name, replicas }) => {
    if (!groups.has(name)) { groups.set(name, makeGroup(name)); at("pools").append(groups.get(name).node); }
    const group = groups.get(name), { byId, tiles } = group, roomy = replicas.length <= ROOMY;
    const wanted = replicas.map((row) => row[0]).join();
    if (group.wanted !== wanted || group.roomy !== roomy) {
      Object.assign(group, { wanted, roomy });
      byId.clear();
      for (const row of replicas) byId.set(row[0], el("button", { type: "button", tabindex: byId.size ? -1 : 0 }));
      tiles.replaceChildren(...byId.values());
      tiles.classList.toggle("roomy", roomy);
      group.node.style.flexBasis = roomy ? `calc(${Math.max(replicas.length, 1)} * var(--tile))` : "100%";
    }
    for (const row of replicas) showTile(byId.get(row[0]), row, roomy);
    const ready = replicas.filter((row) => row[1] === "ready").length, of = (i) => replicas.map((row) => row[i]).filter(known);
    const mean = (values) => values.length ? sum(values) / values.length : null;
    const both = replicas.filter((row) => known(row[10])), ratios = both.map((row) => row[10] / row[9]);
    say(group.head, `${name}: ${ready} of ${replicas.length} ready`);
    say(group.about, [`${count(sum(of(2)))} running`, `${count(sum(of(3)))} waiting`, `KV memory ${percent(mean(of(6)), 0)}`,
      of(8).length ? many(sum(of(8)), "session") : null,
      ratios.length ? `iterations take ${number(mean(ratios), 2)} times as long as believed (${ratios.length} measured)` : "speed not measured",
      queue.full[name] ? `${queue.full[name]} have as many requests as they may` : null].filter(Boolean).join(" · "));
  });
  find();
  showReplica();
}
function find() {
  const text = at("find").value.trim();
  for (const { tiles } of groups.values())
    for (const tile of tiles.children) tile.classList.toggle("dim", text !== "" && !tile.row[0].includes(text));
}

const REASONS = { error: "the policy failed", too_slow: "the policy was too slow", breaker_open: "the breaker is open", stale: "nothing current is known",
  incompatible: "the policy is not for these replicas", missing: "the policy is missing" };
function why(one) {
  const [chosen] = one.candidates, parts = [];
  if (one.explored) parts.push(el("span", { class: "warn" }, "drawn at random. "));
  if (one.fallback_reason) parts.push(el("span", { class: "bad" }, `baseline decided: ${REASONS[one.fallback_reason] || one.fallback_reason}. `));
  const cost = one.has_costs ? `cost ${number(chosen.cost, 3)}` : `expected wait ${number(chosen.cost, 3)} s`;
  const rank = one.num_candidates === 1 ? "the only candidate" : one.num_better ? `${one.num_better} of ${one.num_candidates} lower` : `lowest of ${one.num_candidates}${one.num_equal ? `, ${many(one.num_equal, "other")} as low` : ""}`;
  parts.push(`${cost}, ${rank}`);
  if (one.cached_tokens) parts.push(`; ${count(one.cached_tokens)} of ${count(one.prompt_tokens)} prompt tokens cached`);
  return el("span", {}, ...parts);
}
function showDecisions({ decisions, baseline }) {
  const compared = decisions.some((one) => one.by_rule !== null);
  const heads = ["Time", "Sent to", "Why", "Next best", ...(compared ? [`Rule: ${readable(baseline)}`] : []), "#µs"];
  show("decisions", decisions.length ? table(heads, decisions.map((one) => {
    const [chosen, ...others] = one.candidates, more = one.num_candidates - one.candidates.length;
    return [time(one.time_s), el("span", { title: chosen.replica_id }, el("b", {}, short(chosen.replica_id)), ` ${chosen.pool}`), why(one),
      el("span", {}, ...others.map((other) => el("span", { class: "chip", title: other.replica_id }, `${short(other.replica_id)} ${number(other.cost, 3)}`)), more > 0 ? `and ${count(more)} more` : null),
      ...(compared ? [one.by_rule === null ? "-" : one.by_rule === chosen.replica_id ? el("span", { class: "soft" }, "the same") : el("span", { title: one.by_rule }, short(one.by_rule))] : []),
      String(one.decision_us)];
  })) : el("p", { class: "soft" }, "No request has come yet."));
}

function trialWords(trial) {
  const parts = [];
  if (trial.mode === "canary")
    parts.push(`${percent(trial.share, 0)} of requests`, `within SLO ${percent(trial.canary_attained_fraction)} of ${trial.canary_requests}, champion ${percent(trial.champion_attained_fraction)} of ${trial.champion_requests}`,
      `evidence against it ${number(trial.log_capital)}; it stops at ${number(trial.stops_at_log_capital)}`);
  else
    parts.push(`names the same replica in ${percent(trial.agreement_fraction)} of ${trial.decisions_compared}`, `failed ${trial.decisions_failed}, left out ${trial.decisions_left_out}`);
  const end = trial.why_ended ? el("div", { class: /worse|failed/.test(trial.why_ended) ? "bad" : "soft" }, `ended: ${trial.why_ended}`) : el("div", { class: "good" }, "goes on");
  return el("span", {}, parts.join("; "), end);
}
function showPolicies({ policies, baseline, decisions }) {
  const { champion, previous, experiment, registry } = policies;
  const compared = decisions.filter((one) => one.by_rule !== null), same = compared.filter((one) => one.by_rule === one.candidates[0].replica_id).length;
  const breaker = champion.breaker_open ? el("b", { class: "bad" }, "breaker open") : `breaker closed, opened ${many(champion.times_opened, "time")}`;
  const rows = [
    ["Decides", policy(champion.name, champion.sha256), el("span", {}, `${champion.source}; ${many(champion.num_decisions, "decision")}; `, breaker)],
    ["Rule", policy(baseline), compared.length ? `would have chosen the same replica in ${same} of the last ${many(compared.length, "decision")}` : "stands in where the policy cannot decide"],
  ];
  if (experiment) rows.push([experiment.mode === "canary" ? "Canary" : "Shadow", policy(experiment.policy.name, experiment.policy.sha256), trialWords(experiment)]);
  if (previous) rows.push(["Before", policy(previous.name, previous.sha256), "a rollback goes back to it"]);
  if (registry) rows.push(["Registry", registry, ""]);
  show("policies", table(["Role", "Policy", "State"], rows));
  show("events", policies.events.length ? table(["Time", "What", "Whom", "Why"], policies.events.map((one) => [time(one.time_s), one.what, /@[0-9a-f]{12}$/.test(one.policy) ? policy(one.policy) : one.policy, one.by ? `${one.why} (${one.by})` : one.why]))
    : el("p", { class: "soft" }, "Nothing since the gateway began."));
}
function showAutopilot({ vetoed, report, reported_s }) {
  if (!report) return show("autopilot", el("p", { class: vetoed ? "warn" : "soft" }, vetoed ? "A person has vetoed it." : "No autopilot has reported since the gateway began."));
  const rows = [["Step", report.step + (report.dry_run ? ", dry run" : ""), report.note], ["Reported", time(reported_s), report.next_s ? `goes on at ${time(report.next_s)}` : ""]];
  if (vetoed) rows.unshift(["Veto", el("span", { class: "warn" }, "a person has stopped it"), ""]);
  if (report.candidate) rows.push(["Candidate", policy(report.candidate), report.in_place_of ? `in place of ${readable(report.in_place_of)}` : ""]);
  if (known(report.gain_fraction)) rows.push(["Gain", percent(report.gain_fraction), `${known(report.gain_ci_low) ? `${percent(report.gain_ci_low)} to ${percent(report.gain_ci_high)}, ` : ""}${many(report.pairs, "pair")}`]);
  if (known(report.twin_error_fraction)) rows.push(["Simulator", percent(report.twin_error_fraction), "off the logged mean response"]);
  show("autopilot", table(["What", "Value", "More"], rows));
}
function showWaiting(queue) {
  at("waiting").hidden = queue.max_requests === undefined;
  if (at("waiting").hidden) return;
  const full = Object.entries(queue.full).map(([pool, num]) => `${pool}: ${many(num, "replica")} with as many requests as may be`);
  show("waiting-body", el("p", { class: "soft" }, `${count(queue.held)} of at most ${count(queue.max_requests)}, for at most ${number(queue.max_wait_s, 0)} s. ${full.join("; ")}`),
    queue.requests.length ? table(["Request, the next first", "Tenant", "#Prompt tokens", "#Waited, s", "Why it is held"], queue.requests.map((one) => [one.request_id, one.tenant || "", count(one.prompt_tokens), number(one.waited_s, 1),
      one.session ? `session ${one.session}: no KV memory or no room in ${one.pools.join(", ")}` : `no replica of ${one.pools.join(", ")} has room`])) : null);
}
// Counters of tenants are of the gateway's life; what is shown is what came since a minute ago, or since the page was opened.
const counted = [];
function showTenants({ tenants, now_s }) {
  at("tenants").hidden = !tenants.length;
  counted.push({ now_s, byName: new Map(tenants.map((one) => [one.tenant, one])) });
  while (counted[0].now_s < now_s - 60) counted.shift();
  const before = counted[0].byName, since = (one, key) => count(one[key] - (before.get(one.tenant) || one)[key]);
  show("tenants-body", table(["Tenant", "#Requests", "#Output tokens", "#Refused"], tenants.map((one) => [one.tenant, since(one, "requests"), since(one, "output_tokens"), since(one, "refused")])));
}

const planWords = (plan) => `${plan.parallelism} on ${plan.num_gpus} GPUs (${plan.num_replicas} x ${plan.tensor_parallel}), memory ${percent(plan.memory_fraction, 0)}`;
function showAllocation(answer) {
  const states = [answer.dry_run ? "dry run: nothing is done" : null, answer.by_hand ? "set by hand" : null, answer.changing ? "changing" : "settled"].filter(Boolean);
  const rows = [
    ["In force", planWords(answer.plan), `${number(answer.plan.goodput_capacity_per_s)} requests/s within the SLO, $${number(answer.plan.usd_per_slot, 3)} a slot`],
    ["Proposed", planWords(answer.proposed), answer.policy],
    ["GPUs", `${answer.gpus_held} of ${answer.gpu_budget}`, states.join(", ")],
    ["Demand", `${number(answer.demand_per_s.at(-1) ?? 0)} requests/s`, `a slot is ${number(answer.slot_s, 0)} s`],
  ];
  const failed = Object.entries(answer.fallbacks);
  if (failed.length) rows.push(["Stand-in", el("span", { class: "bad" }, failed.map(([reason, num]) => `${reason} ${num}`).join(", ")), ""]);
  const phases = (one) => Object.entries(one.phases_s).map(([name, seconds]) => `${name.replace("_", " ")} ${number(seconds, 1)} s`).join(", ");
  const outcome = (one) => el("span", { class: { done: "good", refused: "warn", "given up": "bad" }[one.outcome] || "soft" }, one.outcome);
  show("allocation-body", table(["What", "Plan", "More"], rows), el("p", { class: "soft" }, answer.reason),
    table(["Replicas", "#Wanted", "#Ready", "#Starting", "#Stopping"], answer.shapes.map((one) => [one.shape, one.wanted, one.ready, one.starting, one.stopping].map(String))),
    table(["Time", "Change", "Outcome", "How long", "Why"], answer.changes.slice(0, 8).map((one) => [time(one.time_s), `${one.by}: ${one.old} → ${one.new}`, outcome(one), phases(one), one.reason])));
}

async function get(path) {
  const token = sessionStorage.getItem(KEY);
  const answer = await fetch(path, { headers: token ? { authorization: `Bearer ${token}` } : {}, cache: "no-store", signal: AbortSignal.timeout(GIVE_UP_MS) });
  if (!answer.ok) throw Object.assign(new Error(answer.status === 401 ? "give the server's token" : answer.status === 403 ? "give an admin's key" : `the server answers ${answer.status}`), { status: answer.status });
  return answer.json();
}
let allocationAt_s = 0;
async function refresh() {
  const status = at("status");
  try {
    const newest_s = bins.size ? Math.max(...bins.keys()) : 0;
    const answer = await get(`v1/console?since_s=${newest_s}`);
    const allocation = answer.has_allocation && answer.now_s >= allocationAt_s + ALLOCATION_EVERY_S ? await get("v1/allocation") : null;
    const started_ms = performance.now();
    keep(answer.bins, answer.now_s);
    group(answer);
    for (const part of [showTroubles, showNumbers, showCharts, showPools, showPolicies, showDecisions]) part(answer);
    showAutopilot(answer.autopilot); showWaiting(answer.queue); showTenants(answer);
    at("allocation").hidden = !answer.has_allocation;
    if (allocation) { showAllocation(allocation); allocationAt_s = answer.now_s; }
    at("login").hidden = true;
    say(at("clock"), time(answer.now_s));
    say(status, "live"); status.className = "good";
    document.body.dataset.scriptMs = (performance.now() - started_ms).toFixed(1);
    document.body.dataset.shownS = String(answer.now_s);
  } catch (error) {
    at("login").hidden = error.status !== 401 && error.status !== 403;
    say(status, error.name === "TimeoutError" ? "the server does not answer" : error.message); status.className = "bad";
  }
  setTimeout(refresh, PERIOD_MS);
}
at("login").addEventListener("submit", (event) => { event.preventDefault(); sessionStorage.setItem(KEY, at("token").value); });
at("find").addEventListener("input", find);
function theme(name) {
  document.documentElement.dataset.theme = name;
  at("theme").textContent = name === "dark" ? "Light" : "Dark";
}
theme(localStorage.getItem("tokenyard-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
at("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("tokenyard-theme", next);
  theme(next);
});
// On a phone what is long begins folded.
if (matchMedia("(max-width: 640px)").matches) for (const one of document.querySelectorAll("details")) one.open = false;
refresh();
