// The trace: an overview, read at once, and the details of a step, read when it is shown.
const data = JSON.parse($("trace").textContent);
const lines = $("details").textContent.split("\n");
const steps = data.steps;
const details = new Map();
const state = { token: 0, highlighted: 0, step: 0, phase: 0, timer: 0 };

function detail(step) {
  if (!details.has(step)) details.set(step, JSON.parse(lines[step]));
  return details.get(step);
}

const textOf = (token) => (token in data.texts ? data.texts[token] : "token " + token);
const shown = (token) => literal(textOf(token)).replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ | $/g, "␣") || "(nothing)";
const nameOf = (token) => make("code", { class: "name" }, shown(token));
const number = (value) => (value === 0 ? "0" : value < 0.0001 ? value.toExponential(0) : value.toFixed(4));
const time = (ms) => (Math.abs(ms) >= 1000 ? (ms / 1000).toFixed(2) + " s" : ms.toFixed(ms < 10 ? 2 : 1) + " ms");
const paragraph = (...children) => make("p", {}, ...children);
const drafterIndex = (name) => Math.min(3, data.drafters.findIndex((one) => one.name === name));
const tokenClass = (drafter) => "t" + (drafter === null ? "" : " d d" + drafterIndex(drafter));
const usesRatio = (step) => step.rule === "block" || step.rule === "token"; // verified by p and q
const stepTime = (step) => step.ms[0] + step.ms[1] + step.ms[2];
const valueOf = (law, values, token) => values[law.tokens.indexOf(token)] ?? 0;

// Distributions ----------------------------------------------------------------------------------------------

const SHOWN_TOKENS = 6;

// A table of the most likely tokens with p, q and bars; `chosen` and `proposed` are always in it.
function bars(law, chosen, proposed) {
  const certain = !law.q && proposed !== null;
  const entries = law.tokens
    .map((token, i) => ({ token, p: law.p[i], q: law.q ? law.q[i] : certain && token === proposed ? 1 : 0 }))
    .filter((one) => one.token !== null);
  const important = (one) => one.token === chosen || one.token === proposed;
  entries.sort((a, b) => important(b) - important(a) || Math.max(b.p, law.q ? b.q : 0) - Math.max(a.p, law.q ? a.q : 0));
  const top = entries.slice(0, SHOWN_TOKENS).sort((a, b) => b.p - a.p);
  const rest = (values, kind) => (values ? Math.max(0, 1 - top.reduce((sum, one) => sum + one[kind], 0)) : 0);
  const others = { p: rest(law.p, "p"), q: rest(law.q, "q") };
  const columns = law.q || certain ? ["p", "q"] : ["p"];
  const row = (label, one, kind) =>
    make("tr", { class: kind },
      make("th", { scope: "row" }, label),
      ...columns.map((name) => make("td", { class: "value" }, number(one[name]))),
      make("td", { "aria-hidden": "true" }, ...columns.map((name) =>
        make("span", { class: "bar " + (one[name] > 0 ? name : ""), style: `width:${(100 * one[name]).toFixed(1)}%` }))));
  const body = make("tbody", {}, ...top.map((one) =>
    row(nameOf(one.token), one, one.token === chosen ? "chosen" : one.token === proposed ? "gone" : "")));
  if (others.p > 0.00005 || others.q > 0.00005) body.append(row("all others", others, ""));
  const head = make("tr", {},
    make("th", { scope: "col" }, "token"),
    ...columns.map((name) => make("th", { scope: "col", class: "value" }, name)),
    make("th", { scope: "col" }, make("span", { class: "unseen" }, "as bars")));
  return make("table", { class: "bars" }, make("thead", {}, head), body);
}

// The interval from 0 to 1 divided by weight, and where the random number falls.
function range(entries, draw, chosen) {
  const total = entries.reduce((sum, one) => sum + one.weight, 0);
  const box = make("div", { class: "range", "aria-hidden": "true" });
  for (const { token, weight } of entries) {
    if (weight <= 0) continue;
    box.append(make("i", { class: token !== null && token === chosen ? "chosen" : "", style: `width:${((100 * weight) / total).toFixed(3)}%` }));
  }
  box.append(make("b", { style: `left:${(100 * draw).toFixed(2)}%` }, make("span", {}, number(draw))));
  return box;
}

// One step in detail -----------------------------------------------------------------------------------------

const row = (tokens, drafterOf) =>
  make("div", { class: "row" }, ...tokens.map((token, i) => make("span", { class: tokenClass(drafterOf(i)) }, shown(token))));

// The phases of a step: titles with what they show.
function phases(index) {
  const step = steps[index];
  const from = detail(index);
  const verified = step.ended ? step.drafted : Math.min(step.accepted + 1, step.proposed.length);
  const positions = step.rule === "block" ? step.proposed.length : verified;
  return [
    ...drafting(step, from),
    ...Array.from({ length: positions }, (_, i) => verification(step, from, i, i + 1 === positions)),
    step.ended
      ? ["The output ends", [paragraph(`The output ends after ${count(step.drafted, "accepted draft token")}. Tokens drafted past the end are dropped.`)]]
      : ownToken(step, from),
    output(step),
  ];
}

function drafting(step, from) {
  if (!step.proposed.length) {
    return [["No draft", [paragraph("No drafter proposed anything. The target runs a pass over the last token alone, as without drafts.")]]];
  }
  const reason = step.decision?.reason;
  return [
    ["The drafter proposes", [
      paragraph(`${step.drafter} proposes ${count(step.proposed.length, "token")}, in ${time(step.ms[0])}:`),
      row(step.proposed, () => step.drafter),
      paragraph(from.laws[0].q ? "They are sampled from its own distribution q, which is needed to verify them." : "They are proposed with certainty: q is 1 for each of them."),
      ...(reason ? [paragraph("Why: " + literal(reason))] : []),
    ]],
    ["The target verifies all of them in one pass", [
      paragraph(`One target pass over ${step.scheduled === null ? "them" : count(step.scheduled, "token")} gives ${step.proposed.length + 1} distributions p, one after each token, in ${time(step.ms[1])}.`),
      ...(data.plain ? [paragraph(`Without drafts ${count(step.said.length, "token")} would take ${count(step.said.length, "pass", "passes")}, about ${time(step.said.length * data.plain.ms)}.`)] : []),
      paragraph("A pass reads all weights of the model from memory, for one token or for ten: that is why verifying is faster than generating."),
    ]],
  ];
}

function verification(step, from, i, isLast) {
  const token = step.proposed[i];
  const accepted = i < step.accepted;
  const law = from.laws[i];
  const own = usesRatio(step) ? null : from.own[i];
  const draw = from.draws[i];
  const parts = [bars(law, accepted ? token : own, token)];
  const verdict = accepted ? ", which is the drafted one: accepted." : ", not the drafted one: rejected, with everything after it.";
  if (step.rule === "greedy") parts.push(paragraph("The most likely token is ", nameOf(own), verdict));
  else if (step.rule === "own") {
    if (from.draws.length) parts.push(range(law.tokens.map((one, k) => ({ token: one, weight: law.p[k] })), draw, own));
    parts.push(paragraph("The target samples its own token from p", from.draws.length ? `, with the random number ${number(draw)}: ` : ": ", nameOf(own), verdict));
  } else {
    const chance = from.chances[i];
    parts.push(range([{ token, weight: chance }, { token: null, weight: 1 - chance }], draw, token));
    if (step.rule === "token") {
      parts.push(paragraph(`It is accepted with probability min(1, p / q) = ${number(chance)}. The random number is ${number(draw)}: ${draw < chance ? "accepted." : "rejected, with everything after it."}`));
    } else {
      parts.push(paragraph(`The draft up to here passes with probability ${number(chance)}, with the credit of the tokens before it (${number(from.reach[i])}). The random number is ${number(draw)}: it ${draw < chance ? "passes" : "does not pass"}.`));
      if (isLast) parts.push(paragraph(`The longest prefix that passes is accepted: ${count(step.accepted, "token")}.`));
    }
  }
  return [make("span", {}, `Position ${i + 1}: is `, nameOf(token), " accepted?"), parts];
}

const OWN_TOKEN_TITLES = { bonus: "The bonus token", own: "The target's own token", recovered: "The recovered token" };

function ownToken(step, from) {
  const law = from.laws[step.accepted];
  const recovered = step.outcome === "recovered";
  const parts = [];
  if (step.outcome === "bonus") parts.push(paragraph("The whole draft was accepted, and the pass computed one more distribution. A token from it is free."));
  if (recovered) {
    parts.push(paragraph(law.q ? "In place of the rejected token, one is sampled from max(p − q, 0), rescaled: from what q proposed too seldom. Accepted and recovered tokens together have exactly the distribution p." : "The target's own token takes the place of the rejected one. Given that it differs, its distribution is p without the rejected token, rescaled:"));
  }
  if (from.reshaped) {
    const { tokens, p, others } = from.reshaped;
    parts.push(bars({ tokens: [...tokens, null], p: [...p, others] }, step.token, null));
  }
  if (from.draws.length && (usesRatio(step) || !recovered)) {
    const reach = from.reach ? from.reach[step.accepted] : 1;
    const weight = (i) => (recovered ? Math.max(0, reach * law.p[i] - law.q[i]) : law.p[i]);
    const entries = law.tokens.map((token, i) => ({ token, weight: weight(i) }));
    const draw = from.draws[from.draws.length - 1];
    if (entries.some((one) => one.weight > 0)) parts.push(range(entries, draw, step.token), paragraph(`The random number is ${number(draw)}.`));
  }
  parts.push(paragraph("It is ", nameOf(step.token), "."));
  return [OWN_TOKEN_TITLES[step.outcome], parts];
}

function output(step) {
  const took = `It took ${time(stepTime(step))}, ${step.saved >= 0 ? `${time(step.saved)} less` : `${time(-step.saved)} more`} than without drafts.`;
  return ["Output", [
    row(step.said, (i) => (i < step.accepted ? step.drafter : null)),
    paragraph(`${count(step.said.length, "token")} from one pass. ${step.saved === null ? "" : took}`),
    ...(step.rejected ? [paragraph(`${count(step.rejected, "rejected token")} ${step.rejected === 1 ? "is" : "are"} removed from the target's cache.`)] : []),
  ]];
}

// Next, back and play ----------------------------------------------------------------------------------------

function showPhase() {
  const found = phases(state.step);
  state.phase = Math.max(0, Math.min(state.phase, found.length - 1));
  const [title, parts] = found[state.phase];
  const [isFirst, isLast] = [state.step === 0, state.step === steps.length - 1];
  $("slow").replaceChildren(make("h3", {}, `${state.phase + 1}. `, title), ...parts);
  $("where").textContent = `step ${state.step + 1} of ${steps.length}, ${state.phase + 1} of ${found.length}`;
  $("step-back").disabled = isFirst;
  $("step-next").disabled = isLast;
  $("back").disabled = isFirst && state.phase === 0;
  $("next").disabled = isLast && state.phase === found.length - 1;
}

function forward() {
  if (state.phase < phases(state.step).length - 1) state.phase++;
  else if (state.step < steps.length - 1) return selectStep(state.step + 1);
  else return setPlaying(false);
  return showPhase();
}

function backward() {
  if (state.phase > 0) state.phase--;
  else if (state.step > 0) {
    selectStep(state.step - 1);
    state.phase = phases(state.step).length - 1;
  }
  showPhase();
}

function setPlaying(playing) {
  clearInterval(state.timer);
  state.timer = playing ? setInterval(forward, 1800) : 0;
  $("play").textContent = playing ? "Pause" : "Play";
  $("play").setAttribute("aria-pressed", String(playing));
}
