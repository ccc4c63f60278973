"""Script that uses spawned worker processes, which import it again."""

import multiprocessing


class Task:
    """A picklable task for a worker process."""

    def __init__(self, number):
        self.number = number

    def __call__(self):
        return self.number**2, __name__


def run(task):
    """Do one task."""
    return task()


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(run, [Task(2), Task(3)]))
