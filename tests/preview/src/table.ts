// The two transformations that our tables use: merge by label, then name and order the columns.

import { DataFrame, Field, FieldType, toDataFrame } from '@grafana/data';

interface Organize {
  excludeByName: Record<string, boolean>;
  indexByName: Record<string, number>;
  renameByName: Record<string, string>;
}

type Line = Record<string, string | number>;

/** Returns one frame of several, with a line for each combination of labels. */
export function mergedTable(frames: DataFrame[], organize: Organize): DataFrame {
  const lines = new Map<string, Line>();
  for (const frame of frames) {
    const value = frames.length === 1 ? 'Value' : `Value #${frame.refId}`;
    for (let index = 0; index < frame.length; index++) {
      const labels = labelsOf(frame, index);
      const key = JSON.stringify(labels);
      const number = frame.fields.find((field) => field.type === FieldType.number)!.values[index];
      lines.set(key, { ...labels, ...lines.get(key), [value]: number });
    }
  }
  return organized([...lines.values()], organize);
}

function labelsOf(frame: DataFrame, index: number): Line {
  const labels = frame.fields.filter((field) => field.type === FieldType.string);
  return Object.fromEntries(labels.map((field) => [field.name, field.values[index]]));
}

function organized(
  lines: Line[],
  { excludeByName, indexByName, renameByName }: Organize
): DataFrame {
  const names = [...new Set(lines.flatMap((line) => Object.keys(line)))]
    .filter((name) => !excludeByName[name])
    .sort((one, other) => (indexByName[one] ?? 99) - (indexByName[other] ?? 99));
  const fields: Array<Partial<Field>> = names.map((name) => ({
    name: renameByName[name] ?? name,
    type: name.startsWith('Value') ? FieldType.number : FieldType.string,
    values: lines.map((line) => line[name] ?? null),
    config: {},
  }));
  return toDataFrame({ fields: fields as Field[] });
}
