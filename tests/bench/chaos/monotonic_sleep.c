/* libfaketime 0.9.10 adds the offset of the wall clock to sleeps until a time of any other clock,
   also where that clock is not faked. So each time.sleep() of Python 3.11 and later fails with
   EINVAL, or takes too long. This library is loaded before libfaketime. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until,
                    struct timespec *left)
{
    return syscall(SYS_clock_nanosleep, clock, flags, until, left) == 0 ? 0 : errno;
}
