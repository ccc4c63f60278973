// Grafana's own transformations, by which a panel joins and names the answers to its queries.

import {
  DataFrame,
  DataTransformerConfig,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
} from '@grafana/data';
import { lastValueFrom } from 'rxjs';

// Two of them are the same under an old name.
const BY_ID = new Map(Object.values(standardTransformers).map((info: any) => [info.id, info]));
standardTransformersRegistry.setInit(
  () =>
    [...BY_ID.values()].map((info) => ({
      id: info.id,
      name: info.name,
      transformation: () => Promise.resolve(info),
    })) as any
);

/** Returns the frames after all transformations of a panel. */
export function transformed(
  frames: DataFrame[],
  transformations: DataTransformerConfig[] = []
): Promise<DataFrame[]> {
  return lastValueFrom(
    transformDataFrame(transformations, frames, { interpolate: (text: string) => text })
  );
}
