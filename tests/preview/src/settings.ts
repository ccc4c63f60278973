// What is drawn, as preview.py asks for it.

export interface Settings {
  dashboard: string;
  prometheus: string;
  from: number; // seconds since 1970
  to: number;
  step: number; // seconds between two points
  window: string; // in place of $__rate_interval
  run: string; // in place of $run
  run_a: string; // in place of $run_a
  run_b: string; // in place of $run_b
  label: string;
}

export async function readSettings(): Promise<Settings> {
  return (await fetch('settings.json')).json();
}
