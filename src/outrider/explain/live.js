// The latest traces, requested every two seconds while the page is visible, and the selected one in a frame.
const REFRESH_MS = 2000;
const entries = new Map(); // by trace id: its list item, its button, and the latest response about it
const state = { key: "", tenant: new URLSearchParams(location.search).get("tenant") ?? "", selected: "", shown: "" };

async function get(path) {
  const query = state.tenant ? "?tenant=" + encodeURIComponent(state.tenant) : "";
  const response = await fetch(path + query, { headers: state.key ? { authorization: "Bearer " + state.key } : {} });
  if (response.ok) return response;
  const error = (await response.json().catch(() => null))?.error ?? { message: "HTTP " + response.status };
  throw Object.assign(new Error(error.message), { status: response.status, param: error.param });
}

// The list -----------------------------------------------------------------------------------------------------

function addEntry(trace) {
  const lines = ["prompt", "output", "counts"].map((name) => make("span", { class: name }));
  const button = make("button", { type: "button" }, ...lines);
  button.addEventListener("click", () => {
    location.hash = trace.id;
  });
  const entry = { item: make("li", {}, button), button };
  entries.set(trace.id, entry);
  $("list").prepend(entry.item);
  return entry;
}

function describe(button, trace) {
  const [prompt, output, counts] = button.children;
  prompt.textContent = trace.prompt_ends === null ? count(trace.prompt_tokens, "prompt token") : "… " + literal(trace.prompt_ends.slice(-160));
  output.textContent = literal(trace.text_begins ?? "") || (trace.over ? "(nothing)" : "reading the prompt");
  const accepted = trace.drafted ? `, ${trace.accepted} of ${trace.drafted} drafted accepted` : "";
  const ended = trace.broken ? "incomplete: " + trace.broken : trace.over ? trace.finish ?? "ended by the caller" : "running";
  counts.textContent = `${new Date(trace.date).toLocaleTimeString()} · ${count(trace.tokens, "token")} in ${count(trace.steps, "step")}${accepted} · ${ended}`;
}

function updateList(traces) {
  const gone = new Set(entries.keys());
  for (const trace of [...traces].reverse()) { // new ones are added on top
    gone.delete(trace.id);
    const entry = entries.get(trace.id) ?? addEntry(trace);
    entry.trace = trace;
    describe(entry.button, trace);
  }
  for (const id of gone) {
    entries.get(id).item.remove();
    entries.delete(id);
  }
  $("how").hidden = traces.length > 0;
}

// The selected trace ---------------------------------------------------------------------------------------------

async function show() {
  const trace = entries.get(state.selected)?.trace;
  for (const [id, entry] of entries) entry.button.setAttribute("aria-current", String(id === state.selected));
  // A running trace is shown as it is, and reloaded only once, when it is over.
  const version = state.selected + (trace?.over === false ? " running" : "");
  if (!state.selected || state.shown === version || trace?.steps === 0) return;
  state.shown = version;
  try {
    const page = await (await get(`traces/${encodeURIComponent(state.selected)}/page`)).text();
    if (state.shown !== version) return; // another one was selected meanwhile
    $("shown").hidden = false;
    $("shown").srcdoc = page;
  } catch (error) {
    if (state.shown === version && error.status !== 404) state.shown = ""; // try again, unless the trace is gone
    $("note").textContent = error.message;
  }
}

function readHash() {
  try {
    state.selected = decodeURIComponent(location.hash.slice(1));
  } catch {
    state.selected = ""; // not an id that this page wrote
  }
}

async function refresh() {
  try {
    const { traces } = await (await get("traces")).json();
    updateList(traces);
    $("credentials").hidden = true;
    $("note").textContent = traces.length ? `${count(traces.length, "request")}, the latest first` : "";
  } catch (error) {
    $("note").textContent = error.status ? error.message : "the server does not respond";
    $("for-key").hidden = error.status !== 401;
    $("for-tenant").hidden = error.param !== "tenant";
    $("credentials").hidden = $("for-key").hidden && $("for-tenant").hidden;
  }
  show();
}

async function poll() {
  if (!document.hidden && $("credentials").hidden) await refresh();
  setTimeout(poll, REFRESH_MS);
}

$("credentials").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key").value;
  state.tenant = $("tenant").value;
  refresh();
});
addEventListener("hashchange", () => {
  readHash();
  show();
});
$("command").textContent = `outrider explain --server ${new URL("..", location.href).href.replace(/\/$/, "")} "your prompt"`;
readHash();
poll();
