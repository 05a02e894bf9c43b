// SPDX-License-Identifier: Apache-2.0
// Single marks of the access map as shapes, and which of them is pointed at.

function outline(context, look, { piece, x, x1, y0, y1 }) {
  context.strokeStyle = look[piece.kind];
  context.lineWidth = 1.2;
  context.setLineDash({ warm: [], kernel: [5, 3], other: [1, 3] }[piece.kind]);
  context.strokeRect(x, y0, Math.max(1, x1 - x), Math.max(1, y1 - y0));
  context.setLineDash([]);
}

function access(context, look, { piece, x, y, y0, y1 }, r) {
  const colour = look.ranks[rankColour(piece.rank)];
  if (y1 - y0 > 7) {
    context.fillStyle = colour;
    context.globalAlpha = 0.4;
    context.fillRect(x - 2, y0, 4, y1 - y0);
    context.globalAlpha = 1;
  }
  drawShape(context, rankShape(piece.rank), x, y, r);
  context.fillStyle = colour;
  context.fill();
  if (r < 4) return;
  context.lineWidth = 1;
  context.strokeStyle = look.back;
  context.stroke();
}

// A cross (upright: late) where the miss began, and a line for as long as it was waited for.
function missed(context, look, { piece, x, x1, y }, r = 4) {
  context.strokeStyle = look[piece.kind];
  context.lineWidth = r < 4 ? 1.4 : 2;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(Math.max(x + 1, x1), y);
  const arms = piece.kind === "late" ? [[-r, 0], [0, -r]] : [[-r, -r], [-r, r]];
  for (const [dx, dy] of arms) {
    context.moveTo(x + dx, y + dy);
    context.lineTo(x - dx, y - dy);
  }
  context.stroke();
}

function nearestShape(list, x, y) {
  let best = 12 ** 2, near = null;
  for (const mark of list) {
    if (mark.piece.layer === "ahead") continue;
    const dy = y < mark.y0 ? mark.y0 - y : y > mark.y1 ? y - mark.y1 : 0;
    const end = mark.piece.layer === "miss" ? mark.x1 : mark.x;
    const dx = x < mark.x ? mark.x - x : x > end ? x - end : 0;
    // The shape itself before its range; a miss before the access that it was.
    const distance = dx ** 2 + Math.min(dy ** 2 + 9, (y - mark.y) ** 2)
      - (mark.piece.layer === "miss" ? 1 : 0);
    if (distance < best) {
      best = distance;
      near = mark;
    }
  }
  return near ?? list.find((mark) => (
    mark.piece.layer === "ahead" && x >= mark.x && x <= mark.x1 && y >= mark.y0 && y <= mark.y1));
}
