// Gives values their unit, colors and words, as a panel's field configuration says.

import {
  DataFrame,
  Field,
  FieldColorModeId,
  FieldConfig,
  FieldType,
  getDisplayProcessor,
  GrafanaTheme2,
  ThresholdsMode,
} from '@grafana/data';

export interface FieldSource {
  defaults: FieldConfig;
  overrides: Array<{
    matcher: { id: string; options: string };
    properties: Array<{ id: string; value: unknown }>;
  }>;
}

/** Returns the frames with what Grafana would work out before it draws them. */
export function configured(
  frames: DataFrame[],
  source: FieldSource,
  theme: GrafanaTheme2
): DataFrame[] {
  const range = rangeOf(frames);
  return frames.map((frame, index) => ({
    ...frame,
    fields: frame.fields.map((field) =>
      field.type === FieldType.time
        ? timed(field, theme)
        : valued(field, index, source, range, theme)
    ),
  }));
}

function timed(field: Field, theme: GrafanaTheme2): Field {
  return { ...field, display: getDisplayProcessor({ field, theme, timeZone: 'utc' }) };
}

function valued(
  field: Field,
  seriesIndex: number,
  source: FieldSource,
  range: { min: number; max: number },
  theme: GrafanaTheme2
): Field {
  const config = merged(field, source);
  const whole = { min: config.min ?? range.min, max: config.max ?? range.max };
  const made: Field = {
    ...field,
    config,
    state: { seriesIndex, range: { ...whole, delta: whole.max - whole.min } },
  };
  made.display = getDisplayProcessor({ field: made, theme, timeZone: 'utc' });
  return made;
}

function merged(field: Field, source: FieldSource): FieldConfig {
  const config: FieldConfig = structuredClone({
    color: { mode: FieldColorModeId.Thresholds },
    mappings: [],
    thresholds: { mode: ThresholdsMode.Absolute, steps: [{ value: -Infinity, color: 'green' }] },
    ...source.defaults,
    ...field.config,
    custom: { ...(source.defaults.custom ?? {}) },
  });
  const name = shownName(field);
  for (const override of source.overrides) {
    if (override.matcher.options === name) {
      override.properties.forEach(({ id, value }) => assign(config, id, structuredClone(value)));
    }
  }
  for (const step of config.thresholds!.steps) {
    step.value ??= -Infinity; // JSON knows no infinity: the lowest step has null
  }
  return config;
}

/** Returns the name by which a field is shown, sorted and configured. */
export function shownName(field: Field): string {
  return field.config.displayName ?? field.config.displayNameFromDS ?? field.name;
}

function assign(config: FieldConfig, id: string, value: unknown): void {
  if (id.startsWith('custom.')) {
    config.custom[id.slice('custom.'.length)] = value;
  } else {
    (config as Record<string, unknown>)[id] = value;
  }
}

function rangeOf(frames: DataFrame[]): { min: number; max: number } {
  const values = frames
    .flatMap((frame) => frame.fields)
    .filter((field) => field.type === FieldType.number)
    .flatMap((field) => [...field.values])
    .filter((value) => Number.isFinite(value));
  return values.length
    ? { min: Math.min(...values), max: Math.max(...values) }
    : { min: 0, max: 1 };
}
