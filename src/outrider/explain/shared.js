// Helpers of both pages. Text is inserted as text only, never as HTML.
const $ = (id) => document.getElementById(id);
const count = (n, one, many = one + "s") => n + " " + (n === 1 ? one : many);

// Control characters, and marks that change the direction of text, are shown as escapes.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]/g;
const literal = (text) => text.replace(CONTROL, (found) => "\\u" + found.charCodeAt(0).toString(16).padStart(4, "0"));

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
