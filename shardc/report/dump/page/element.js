// Elements. Text is only ever text: nothing is parsed as HTML, and style is set property by property.

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (name === 'vars') Object.entries(value).forEach(each => made.style.setProperty(...each));
    else made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== ''));
  return made;
}

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
}

function section(id, title, lede, ...children) {
  const heading = element('h2', { id: `${id}-title` }, title);
  const words = lede ? element('p', { class: 'lede' }, lede) : null;
  return element('section', { id, 'aria-labelledby': `${id}-title`, 'data-title': title }, heading, words, ...children);
}

// A link to what the inspector shows of a value, a collective, a parameter, a module or an annotation.
function link(kind, name, ...children) {
  return element('a', { class: `to ${kind}`, href: address(kind, name) }, ...(children.length ? children : [name]));
}

function address(kind, name) {
  return `#${kind}:${encodeURIComponent(name.toWellFormed ? name.toWellFormed() : name)}`;
}
