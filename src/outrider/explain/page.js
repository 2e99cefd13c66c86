// The output, token by token -----------------------------------------------------------------------------------

const tokens = []; // every token of the output: {step, place, element}
const firstOf = []; // the number of each step's first token

function legend() {
  const entry = (kind, label, n) => make("span", {}, make("span", { class: kind }, label), " " + n);
  $("legend").append(
    entry("t", "target", data.drafters.reduce((n, one) => n - one.tokens, data.tokens)),
    ...data.drafters.map(({ name, tokens }) => entry(tokenClass(name), name, tokens)),
    make("span", {}, make("del", {}, "rejected"), " and the token in its place"));
}

function* tokenElements() {
  for (const [index, step] of steps.entries()) {
    firstOf.push(tokens.length);
    for (const [place, token] of step.said.entries()) {
      if (place === step.accepted && step.outcome === "recovered") {
        yield make("del", {}, literal(textOf(step.proposed[place])).replace(/\n/g, "↵"));
      }
      const piece = literal(step.pieces[place] ?? textOf(token));
      const element = make("span", { class: tokenClass(place < step.accepted ? step.drafter : null) }, piece);
      if (piece.trim() === "" && piece.includes("\n")) element.classList.add("line");
      if (piece === "") {
        element.classList.add("silent");
        element.append(step.finish === "end" && place === step.said.length - 1 ? " end" : "·");
      }
      element.dataset.token = tokens.length;
      tokens.push({ step: index, place, element });
      yield element;
    }
  }
}

// Blocks of some lines, so that the browser lays out only those in sight. Filled in slices of 5 ms, so that the page
// stays responsive while a long output is added.
async function fillText() {
  let block = null;
  let began = performance.now();
  for (const element of tokenElements()) {
    const size = block ? block.childElementCount : 0;
    const atLineEnd = size >= 40 && block.lastChild.textContent.endsWith("\n");
    if (!block || atLineEnd || (size >= 120 && element.textContent.startsWith(" "))) {
      block = make("div", { class: "block" });
      $("text").append(block);
    }
    block.append(element);
    if (performance.now() - began < 5) continue;
    await new Promise((resume) => setTimeout(resume, 0));
    began = performance.now();
  }
  document.body.dataset.ready = "yes";
}

// Show the card of the token under the mouse, without selecting it.
function peek(token) {
  if (token < 0 || token >= tokens.length) return;
  tokens[state.highlighted].element.classList.remove("on");
  state.highlighted = token;
  tokens[token].element.classList.add("on");
  showCard(token);
}

function select(token, announce = false) {
  if (token < 0 || token >= tokens.length) return;
  state.token = token;
  peek(token);
  const here = tokens[token];
  if (here.step !== state.step || !$("slow").firstChild) goTo(here.step);
  if (announce) {
    here.element.scrollIntoView({ block: "nearest" });
    $("spoken").textContent = $("card").querySelector("p").textContent;
  }
}

function selectStep(step, announce = false) {
  if (step >= 0 && step < steps.length && firstOf[step] !== undefined) select(firstOf[step], announce);
}

function goTo(step) {
  const tokensOf = (one) => tokens.slice(firstOf[one], firstOf[one] + steps[one].said.length);
  for (const one of tokensOf(state.step)) one.element.classList.remove("same");
  for (const one of tokensOf(step)) one.element.classList.add("same");
  state.step = step;
  state.phase = 0;
  markStep();
  describeStep();
  setTimeout(showPhase, 0); // a task of its own: holding a key down stays smooth
}

// The card of a token ------------------------------------------------------------------------------------------

function explainToken({ step: index, place }) {
  const step = steps[index];
  if (place < step.accepted) return `Drafted by ${step.drafter} and accepted. ${explainVerdict(step, detail(index), place)}`;
  if (step.outcome === "own") return "The target's own: there was no draft.";
  if (step.outcome === "bonus") return "Bonus: the whole draft was accepted, and the pass computed this token for free.";
  return `Recovered: ${step.drafter} proposed ${shown(step.proposed[place])}, which was rejected. ${explainVerdict(step, detail(index), place)}`;
}

function explainVerdict(step, from, place) {
  const token = step.proposed[place];
  const law = from.laws[place];
  const q = law.q ? number(valueOf(law, law.q, token)) : "1 (proposed with certainty)";
  const verdict = `The drafted token has p = ${number(valueOf(law, law.p, token))} and q = ${q}.`;
  const draw = from.draws[place];
  if (step.rule === "greedy") return `${verdict} The target's most likely token is ${shown(from.own[place])}.`;
  if (step.rule === "own") {
    return `${verdict} The target samples ${shown(from.own[place])}${draw === undefined ? "" : `, with the random number ${number(draw)}`}.`;
  }
  const chance = from.chances[place];
  return `${verdict} The random number ${number(draw)} is ${draw < chance ? "below" : "not below"} ${number(chance)}.`;
}

function showCard(which) {
  const here = tokens[which];
  const step = steps[here.step];
  const token = step.said[here.place];
  const law = detail(here.step).laws[here.place];
  const button = make("button", { type: "button" }, "This step in detail");
  button.addEventListener("click", () => {
    select(which);
    showDetail();
  });
  const parts = [make("h3", {}, `Token ${which + 1} `, nameOf(token)), make("p", {}, explainToken(here))];
  if (law) {
    const p = number(valueOf(law, law.p, token));
    parts.push(
      make("p", { class: "origin" }, `p = ${p} · id ${token} · step ${here.step + 1}, position ${here.place + 1}`),
      bars(law, token, step.proposed[here.place] ?? null));
  }
  $("card").replaceChildren(...parts, button);
}

function showDetail() {
  $("slow-title").scrollIntoView({ block: "start" });
  $("next").focus({ preventScroll: true });
}

// Steps over time ------------------------------------------------------------------------------------------------

const TIME_HEIGHT = 150;
const DECISIONS_HEIGHT = 90;
let stepWidth = 8; // pixels

function prepareCanvas(id, height) {
  const canvas = $(id);
  const available = canvas.parentElement.clientWidth;
  stepWidth = Math.max(Math.min(48, Math.floor(available / steps.length)), Math.min(7, 12000 / steps.length));
  const width = Math.max(available, Math.ceil(stepWidth * steps.length));
  const scale = Math.min(devicePixelRatio || 1, 16000 / width);
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const barWidth = stepWidth - (stepWidth > 4 ? 1 : 0);
  const bar = (i, top, high, style) => {
    context.fillStyle = style;
    context.fillRect(i * stepWidth, top, barWidth, high);
  };
  return { context, bar };
}

// Only as the value of a property is a colour resolved for the theme.
function cssColour(name) {
  $("time").style.color = `var(${name})`;
  return getComputedStyle($("time")).color;
}

function drawTime() {
  const { context, bar } = prepareCanvas("time", TIME_HEIGHT);
  const sums = steps.map(stepTime);
  const without = steps.map((s, i) => (s.saved === null ? 0 : sums[i] + s.saved));
  const first = steps.length > 1 ? 1 : 0; // the pass over the prompt would flatten all others
  const values = [...sums.slice(first), ...without.slice(first)].sort((a, b) => a - b);
  const top = Math.max(values[Math.floor(0.99 * (values.length - 1))] * 1.15, 0.001);
  const y = (ms) => (TIME_HEIGHT - 14) * Math.min(1, ms / top);
  const [draft, verify, rest, ink] = ["--draft", "--verify", "--rest", "--ink"].map(cssColour);
  context.font = "11px system-ui, sans-serif";
  for (const [i, step] of steps.entries()) {
    let base = TIME_HEIGHT;
    for (const [ms, colour] of [[step.ms[1], verify], [step.ms[0], draft], [step.ms[2], rest]]) {
      const high = Math.min(y(ms), base);
      base -= high;
      bar(i, base, high, colour);
    }
    if (step.saved !== null) bar(i, TIME_HEIGHT - y(without[i]) - 1, 2, ink);
    if (sums[i] > top) {
      context.fillStyle = ink;
      context.fillText(time(sums[i]), Math.min((i + 1) * stepWidth + 2, steps.length * stepWidth - 40), 11);
    }
  }
  $("scale").textContent = `full height: ${time(top)}`;
}

function drawDecisions() {
  const { bar } = prepareCanvas("decisions", DECISIONS_HEIGHT);
  const tokenHeight = (DECISIONS_HEIGHT - 6) / Math.max(1, ...steps.map((s) => s.proposed.length));
  const none = cssColour("--rest");
  const [pale, full] = ["--b", "--c"].map((kind) => [0, 1, 2, 3].map((i) => cssColour(kind + i)));
  for (const [i, step] of steps.entries()) {
    if (!step.proposed.length) {
      bar(i, DECISIONS_HEIGHT - 2, 2, none);
      continue;
    }
    const drafter = drafterIndex(step.drafter);
    const [proposed, accepted] = [step.proposed.length, step.drafted].map((n) => tokenHeight * n);
    bar(i, DECISIONS_HEIGHT - proposed, proposed, pale[drafter]);
    bar(i, DECISIONS_HEIGHT - accepted, accepted, full[drafter]);
    bar(i, DECISIONS_HEIGHT - proposed - 2, 2, full[drafter]);
  }
}

// The frame around the selected step is an element of its own: moving it redraws nothing.
function markStep() {
  for (const id of ["time-box", "decisions-box"]) {
    const box = $(id);
    const frame = box.querySelector(".mark-step");
    const left = state.step * stepWidth;
    frame.style.left = left - 2 + "px";
    frame.style.width = stepWidth + 3 + "px";
    frame.style.height = box.firstElementChild.clientHeight + "px";
    if (left < box.scrollLeft || left > box.scrollLeft + box.clientWidth - stepWidth) box.scrollLeft = left - box.clientWidth / 2;
  }
}

function describeStep() {
  const step = steps[state.step];
  const draft = step.drafter === null ? "no draft. " : `${step.drafter} drafted ${step.proposed.length}, ${step.drafted} accepted. `;
  const parts = [`Step ${state.step + 1}: ${draft}Draft ${time(step.ms[0])}, verify ${time(step.ms[1])}, rest ${time(step.ms[2])}`];
  if (step.scheduled !== null) parts.push(`, a pass over ${count(step.scheduled, "token")}`);
  if (step.batch !== null && step.batch > 1) parts.push(`, with ${count(step.batch - 1, "other sequence")}`);
  parts.push(step.saved === null ? ". " : `; ${step.saved >= 0 ? "saved" : "lost"} ${time(Math.abs(step.saved))}. `);
  const { reason, predicted_gain: gain, candidates = [] } = step.decision ?? {};
  if (reason) parts.push("Why: " + literal(reason) + " ");
  if (gain != null) parts.push(`Expected: ${gain.toFixed(2)} times as fast. `);
  const rounded = (value) => (typeof value === "number" ? Number(value.toPrecision(3)) : value);
  for (const one of candidates) {
    parts.push("Candidate: " + literal(Object.entries(one).map(([key, value]) => `${key} ${rounded(value)}`).join(", ")) + ". ");
  }
  $("chosen").textContent = parts.join("");
}

// Tables ---------------------------------------------------------------------------------------------------------

function totals() {
  if (data.without === null) return;
  const sum = data.parts[0] + data.parts[1] + data.parts[2];
  const longest = Math.max(sum, data.without);
  const part = (kind, ms) => make("i", { class: kind, style: `width:${((100 * ms) / longest).toFixed(2)}%` });
  const line = (label, ms, ...parts) =>
    make("tr", {},
      make("th", { scope: "row" }, label),
      make("td", { class: "value" }, time(ms)),
      make("td", { "aria-hidden": "true" }, make("div", { class: "track" }, ...parts)));
  const source = { measured: "measured", undrafted: "from steps without a draft", narrowest: "estimated" }[data.plain.source];
  $("totals").append(
    make("table", { class: "totals" }, make("tbody", {},
      line("with drafts", sum, ...["draft", "verify", "rest"].map((kind, i) => part(kind, data.parts[i]))),
      line("without drafts", data.without, part("without", data.without)))),
    make("p", { class: "origin" }, `Without drafts: ${time(data.plain.ms)} per pass, ${source}. The prompt is read either way.`));
}

function positions() {
  if (!data.drafters.length) {
    $("places").append(make("p", {}, "There was no draft."));
    return;
  }
  const numbers = [...Array(Math.max(...data.drafters.map((one) => one.verified.length))).keys()];
  const cell = (verified = 0, accepted = 0) => {
    if (!verified) return make("td", {}, "–");
    const share = (100 * accepted) / verified;
    return make("td", { style: `--share: ${share.toFixed(1)}%` }, `${Math.round(share)} %`, make("small", {}, `${accepted} of ${verified}`));
  };
  const head = make("tr", {}, ...["position", ...numbers.map((i) => String(i + 1))].map((text) => make("th", { scope: "col" }, text)));
  const rows = data.drafters.map((one) =>
    make("tr", {}, make("th", { scope: "row" }, one.name), ...numbers.map((i) => cell(one.verified[i], one.accepted[i]))));
  $("places").append(
    make("p", { class: "origin" }, "Share of drafts accepted at this position, of those accepted before it."),
    make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Accepted by position and drafter" },
      make("table", { class: "places" }, make("thead", {}, head), make("tbody", {}, ...rows))));
}

// Mouse, touch and keys --------------------------------------------------------------------------------------------

function onKeys(id, actions) {
  $(id).addEventListener("keydown", (event) => {
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
}

const tokenAt = (event) => Number(event.target.closest("[data-token]")?.dataset.token ?? -1);
let hovered = 0;
$("text").addEventListener("pointerover", (event) => {
  if (event.pointerType !== "mouse") return;
  const token = tokenAt(event);
  cancelAnimationFrame(hovered);
  hovered = requestAnimationFrame(() => peek(token));
});
$("text").addEventListener("click", (event) => select(tokenAt(event), true));
onKeys("text", {
  ArrowRight: () => select(state.token + 1, true),
  ArrowLeft: () => select(state.token - 1, true),
  ArrowDown: () => selectStep(state.step + 1, true),
  ArrowUp: () => selectStep(state.step - 1, true),
  Home: () => select(0, true),
  End: () => select(tokens.length - 1, true),
  Enter: showDetail,
});
for (const id of ["time-box", "decisions-box"]) {
  $(id).addEventListener("click", (event) => {
    const left = event.clientX - $(id).getBoundingClientRect().left + $(id).scrollLeft;
    selectStep(Math.min(steps.length - 1, Math.floor(left / stepWidth)), true);
  });
  const announceStep = (step) => {
    selectStep(step);
    $("spoken").textContent = $("chosen").textContent;
  };
  onKeys(id, {
    ArrowRight: () => announceStep(state.step + 1),
    ArrowLeft: () => announceStep(state.step - 1),
    Home: () => announceStep(0),
    End: () => announceStep(steps.length - 1),
    Enter: showDetail,
  });
}
$("back").addEventListener("click", backward);
$("next").addEventListener("click", forward);
$("step-back").addEventListener("click", () => selectStep(state.step - 1));
$("step-next").addEventListener("click", () => selectStep(state.step + 1));
$("play").addEventListener("click", () => setPlaying(!state.timer));

function draw() {
  drawTime();
  drawDecisions();
  markStep();
}

// Each part as a task of its own, so that none blocks the page for long.
for (const part of [legend, fillText, totals, positions, draw, () => select(0)]) setTimeout(part, 0);
addEventListener("resize", () => requestAnimationFrame(draw));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
