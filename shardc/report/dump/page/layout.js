// How a parameter lies on the mesh: a rectangle in as many tiles as it is cut in, each with the ranks that hold it.

const MOST_TILES = 16; // along a side; further ones are not drawn
// Of a pipeline the ranks are those of a stage; its own axis is the first.
const stageAxes = Object.entries(axes).slice(report.timeline ? 1 : 0);
const stageRanks = stageAxes.reduce((product, [, size]) => product * size, 1);
const positions = Array.from({ length: Math.min(stageRanks, 4096) }, (_, position) => position);

// Where a position of the mesh stands along a part of an axis.
function coordinate(position, [name, pre, size]) {
  const names = stageAxes.map(([each]) => each),
    sizes = stageAxes.map(([, each]) => each),
    at = names.indexOf(name);
  const along = Math.floor(position / sizes.slice(at + 1).reduce((product, each) => product * each, 1)) % sizes[at];
  return Math.floor(along / (sizes[at] / (pre * size))) % size;
}

// The pieces of a dim in order: for each the function that says whether a rank holds it.
function pieces(subdims) {
  const last = subdims.reduce((found, [, parts], i) => (parts.length ? i : found), -1);
  let found = [() => true];
  subdims.slice(0, last + 1).forEach(([size, parts], i) => {
    const count = parts.reduce((product, part) => product * part[2], 1);
    const number = i < last ? size : count,
      each = i < last ? Math.ceil(size / count) : 1;
    const holds = place => rank =>
      parts.reduce((index, part) => index * part[2] + coordinate(rank, part), 0) === Math.floor(place / each);
    found = found
      .flatMap(outer =>
        Array.from({ length: Math.min(number, 4 * MOST_TILES) }, (_, place) => {
          const inner = holds(place);
          return rank => outer(rank) && inner(rank);
        }),
      )
      .slice(0, 4 * MOST_TILES);
  });
  return found;
}

// The two dims that are drawn: the last two, or those that are cut.
function drawnDims(layout) {
  const isCut = subdims => subdims.some(([, parts]) => parts.length);
  const places = layout
    .map((_, i) => i)
    .sort((a, b) => isCut(layout[b]) - isCut(layout[a]) || b - a)
    .slice(0, 2);
  return places.sort((a, b) => a - b);
}

function tiles(entry) {
  const layout = layouts.get(entry.node),
    dims = drawnDims(layout);
  const [rows, columns] =
    dims.length === 2
      ? dims.map(dim => pieces(layout[dim]))
      : [[() => true], dims.length ? pieces(layout[dims[0]]) : [() => true]];
  const held = (row, column) => positions.filter(rank => row(rank) && column(rank));
  return {
    dims,
    height: rows.length,
    width: columns.length,
    rows: rows.slice(0, MOST_TILES).map(row => columns.slice(0, MOST_TILES).map(column => held(row, column))),
  };
}

function axesCutting(entry) {
  const layout = layouts.get(entry.node) || [];
  const cutting = new Set(layout.flat().flatMap(([, parts]) => parts.map(part => part[0])));
  return stageAxes.map(([name]) => name).filter(name => cutting.has(name));
}

// A sign of the layout, for a table.
function smallPicture(entry) {
  if (!layouts.has(entry.node)) return '';
  const found = tiles(entry),
    [width, height] = [44, 26];
  const made = svg('svg', { class: 'tiles', viewBox: `0 0 ${width} ${height}`, width, height, 'aria-hidden': 'true' });
  drawTiles(made, found, width, height, axesCutting(entry));
  return made;
}

function drawTiles(made, found, width, height, cutting) {
  const [h, w] = [height / found.rows.length, width / found.rows[0].length];
  const color = cutting.length ? axisClass(cutting[cutting.length - 1]) : 'axis none';
  return found.rows.flatMap((row, y) =>
    row.map((held, x) => {
      const tone = new Set(found.rows.flat().map(String)).size > 1 ? (y + x) % 2 : 0;
      const tile = svg('rect', {
        class: `${color} tile tone-${tone}`,
        x: x * w + 0.5,
        y: y * h + 0.5,
        width: w - 1,
        height: h - 1,
        rx: 2,
      });
      made.append(tile);
      return { tile, held, x: x * w, y: y * h, w, h };
    }),
  );
}

// The layout with the ranks of each tile, and beside it the ranks: one that is pointed at shows what it holds.
function largePicture(entry) {
  const found = tiles(entry),
    [width, height] = [320, entry.shape.length > 1 ? 150 : 56];
  const made = svg('svg', {
    class: 'tiles large',
    viewBox: `0 0 ${width} ${height}`,
    role: 'img',
    'aria-label': `${entry.name} in tiles, each with the ranks that hold it`,
  });
  const drawn = drawTiles(made, found, width, height, axesCutting(entry));
  for (const { tile, held, x, y, w, h } of drawn) {
    tile.append(svg('title', {}, `held by ${held.map(rankName).join(', ')}`));
    const text = [rankText(held), coordinateText(held[0], entry)].find(each => each.length * 7.5 < w);
    if (text && h > 14) made.append(svg('text', { x: x + w / 2, y: y + h / 2 + 4, 'text-anchor': 'middle' }, text));
  }
  const show = rank =>
    drawn.forEach(each => each.tile.classList.toggle('held', rank !== null && each.held.includes(rank)));
  const shape =
    found.dims.map(dim => `dim ${dim}: ${grouped(entry.shape[dim])}`).join(' down, ') +
    (found.dims.length ? ' across' : 'one number');
  const more =
    found.height > MOST_TILES || found.width > MOST_TILES
      ? `; the first ${MOST_TILES} of ${Math.max(found.height, found.width)} pieces`
      : '';
  return element('figure', { class: 'layout' }, made, rankButtons(show), element('figcaption', {}, shape + more));
}

function rankText(held) {
  const names = held.map(rankName);
  return held.length === stageRanks && stageRanks > 4
    ? `all ${stageRanks} ranks`
    : names.length > 6
      ? `${names.slice(0, 5).join(' ')} …`
      : names.join(' ');
}

// Where the ranks of a tile stand on the axes that cut.
function coordinateText(position, entry) {
  const cutting = axesCutting(entry);
  const along = cutting.map(name => coordinate(position, [name, 1, axes[name]]));
  return cutting.length > 1 ? along.join('·') : `${cutting[0] || ''} ${along[0] ?? ''}`;
}

function rankName(position) {
  return String(report.device_ids ? report.device_ids[position] : position);
}

function rankButtons(show) {
  const last = stageAxes.length ? stageAxes[stageAxes.length - 1][1] : 1;
  const buttons = positions.slice(0, 64).map(rank =>
    element(
      'button',
      {
        type: 'button',
        class: 'rank',
        onmouseenter: () => show(rank),
        onfocus: () => show(rank),
        onmouseleave: () => show(null),
        onblur: () => show(null),
        'aria-label': `show what rank ${rankName(rank)} holds`,
      },
      rankName(rank),
    ),
  );
  return element(
    'div',
    { class: 'ranks' },
    element('span', { class: 'hint' }, report.timeline ? 'ranks of a stage' : 'ranks'),
    element('div', { class: 'grid', vars: { '--columns': String(Math.min(last, 10)) } }, buttons),
  );
}
