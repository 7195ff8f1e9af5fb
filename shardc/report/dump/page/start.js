// All of it, in order; `data-ready` says that it is there.

function start() {
  const sections = [
    overview(),
    step(),
    report.timeline ? schedule() : null,
    report.lanes ? predictedTime() : null,
    data.rings ? ringsSection() : null,
    tree(),
    collectivesSection(),
    parametersSection(),
    notesSection(),
  ].filter(Boolean);
  document
    .getElementById('report')
    .replaceChildren(
      ...sections,
      element(
        'footer',
        {},
        `shardc, ${data.level} program of ${counted(data.nodes.length, 'node')}. `,
        'Bytes are those of one rank; press / to search.',
      ),
    );
  document
    .getElementById('sections')
    .append(...sections.slice(1).map(each => element('a', { href: `#${each.id}` }, each.dataset.title)));
  searching();
  window.addEventListener('hashchange', follow);
  follow();
  document.documentElement.dataset.ready = 'true';
}

start();
