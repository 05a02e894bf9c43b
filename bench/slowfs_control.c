// SPDX-License-Identifier: Apache-2.0
/*
 * slowfs_control.c - the control file: counters as JSON, and the lines that it takes
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 35
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "slowfs.h"

/* The text is made when the file is opened, so that one reader sees one
 * moment however it cuts its reads. */
int control_render(char **text)
{
	int len;

	pthread_mutex_lock(&bed.lock);
	len = asprintf(text,
		"{\"schema\": \"uffdprefetch.slowfs/1\", "
		"\"bandwidth_bytes_per_second\": %" PRIu64 ", \"latency_us\": %" PRIu64 ", "
		"\"max_background\": %d, \"requests\": %" PRIu64 ", \"bytes\": %" PRIu64 ", "
		"\"largest_request_bytes\": %" PRIu64 ", \"most_in_flight\": %" PRIu64 ", "
		"\"in_flight\": %" PRIu64 ", \"errors\": %" PRIu64 ", "
		"\"lookup_us\": %" PRIu64 ", \"lookups\": %" PRIu64 ", "
		"\"getattrs\": %" PRIu64 ", \"opens\": %" PRIu64 ", "
		"\"opendirs\": %" PRIu64 ", \"readdirs\": %" PRIu64 "}\n",
		bed.bandwidth, bed.latency_us, MAX_BACKGROUND, bed.count.requests,
		bed.count.bytes, bed.count.largest_request_bytes,
		bed.count.most_in_flight, bed.in_flight, bed.count.errors, bed.lookup_us,
		bed.count.lookups, bed.count.getattrs, bed.count.opens, bed.count.opendirs,
		bed.count.readdirs);
	pthread_mutex_unlock(&bed.lock);
	return len < 0 ? -ENOMEM : 0;
}

int parse_u64(const char *text, uint64_t *value)
{
	char *end;

	errno = 0;
	*value = strtoull(text, &end, 10);
	return errno || end == text || *end || *text == '-' ? -EINVAL : 0;
}

int parse_seconds(const char *text, double *value)
{
	char *end;

	errno = 0;
	*value = strtod(text, &end);
	return errno || end == text || *end || !(*value >= 0) ? -EINVAL : 0;
}

int control_line(const char *line)
{
	uint64_t value;
	int err = 0;

	pthread_mutex_lock(&bed.lock);
	if (!strncmp(line, "bandwidth=", 10) && !parse_u64(line + 10, &value))
		bed.bandwidth = value;
	else if (!strncmp(line, "latency_us=", 11) && !parse_u64(line + 11, &value))
		bed.latency_us = value;
	else if (!strncmp(line, "lookup_us=", 10) && !parse_u64(line + 10, &value))
		bed.lookup_us = value;
	else if (!strcmp(line, "reset"))
		bed.count = (struct counters){ .most_in_flight = bed.in_flight };
	else if (bed.writers_behind && !strcmp(line, "times=frozen"))
		bed.times_frozen = true;
	else if (bed.writers_behind && !strcmp(line, "times=live"))
		bed.times_frozen = false;
	else if (*line)
		err = -EINVAL;
	pthread_mutex_unlock(&bed.lock);
	return err;
}
