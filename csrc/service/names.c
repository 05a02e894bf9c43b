// SPDX-License-Identifier: Apache-2.0
/*
 * names.c - which names are opened in marked directories, by fanotify(7) or inotify(7).
 *
 * fanotify's form without privileges (Linux 5.13, commit 7cea2a3c505e) reports a directory's file handle and a
 * name; of whoever opened it its process id, which an unprivileged listener is told of its own process only. inotify
 * reports a watch and a name, and of nobody who opened it. Neither asks anything of the process that opens, nor
 * does a full queue hold it up: what does not fit is dropped, and a mark says so.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/fanotify.h>
#include <sys/inotify.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "service/helper.h"

/* linux/fanotify.h, linux/fcntl.h: newer than some headers. */
#ifndef FAN_REPORT_DIR_FID
#define FAN_REPORT_DIR_FID 0x00000400
#endif
#ifndef FAN_REPORT_NAME
#define FAN_REPORT_NAME 0x00000800
#endif
#ifndef AT_HANDLE_FID
#define AT_HANDLE_FID 0x200
#endif
#define INFO_DIRECTORY_AND_NAME 2 /* FAN_EVENT_INFO_TYPE_DFID_NAME */

#define OPENS (FAN_OPEN | FAN_EVENT_ON_CHILD | FAN_ONDIR)
#define HANDLE_BYTES 128 /* MAX_HANDLE_SZ */
/* inotify's events are the shorter ones; fanotify's have no less than their metadata. */
#define READ_BYTES (UP_NAMES_AT_ONCE * sizeof(struct inotify_event))
_Static_assert(sizeof(struct fanotify_event_metadata) > sizeof(struct inotify_event), "fewer fit into a read");

/* struct fanotify_event_info_fid and the struct file_handle in it; a name follows the handle. */
struct info {
	uint8_t type, pad;
	uint16_t length;
	uint8_t fsid[8];
	uint32_t handle_bytes;
	int32_t handle_type;
};

struct handle {
	uint32_t bytes;
	int32_t type;
	uint8_t data[HANDLE_BYTES];
};

int up_fanotify_open(void)
{
	int fd = fanotify_init(FAN_CLASS_NOTIF | FAN_REPORT_DIR_FID | FAN_REPORT_NAME | FAN_CLOEXEC | FAN_NONBLOCK,
			       O_RDONLY | O_CLOEXEC);

	return fd < 0 ? -errno : fd;
}

/* FNV-1a, 64 bits: of some thousand directories no two have the same but by a chance of 2^-40. */
static uint64_t hash(uint64_t h, const void *data, size_t length)
{
	const uint8_t *at = data;

	for (size_t i = 0; i < length; i++)
		h = (h ^ at[i]) * 0x100000001b3u;
	return h;
}

static uint64_t identity(const void *fsid, int32_t type, const void *data, size_t length)
{
	uint64_t h = hash(hash(0xcbf29ce484222325u, fsid, 8), &type, sizeof(type));

	return hash(h, data, length);
}

int up_fanotify_identify(int directory, uint64_t *out)
{
	struct handle handle = { .bytes = HANDLE_BYTES };
	struct statfs fs;
	int mount, ret;

	/* As fanotify encodes it, also where a handle cannot be opened (6.5, commit 96b2b072ee62). */
	ret = name_to_handle_at(directory, "", (struct file_handle *)&handle, &mount, AT_EMPTY_PATH | AT_HANDLE_FID);
	if (ret && errno == EINVAL)
		ret = name_to_handle_at(directory, "", (struct file_handle *)&handle, &mount, AT_EMPTY_PATH);
	if (ret || fstatfs(directory, &fs))
		return -errno;
	*out = identity(&fs.f_fsid, handle.type, handle.data, handle.bytes);
	return 0;
}

int up_fanotify_mark(int fd, int directory)
{
	return fanotify_mark(fd, FAN_MARK_ADD | FAN_MARK_ONLYDIR, OPENS, directory, ".") ? -errno : 0;
}

int up_fanotify_unmark(int fd, int directory)
{
	return fanotify_mark(fd, FAN_MARK_REMOVE | FAN_MARK_ONLYDIR, OPENS, directory, ".") ? -errno : 0;
}

int up_inotify_open(void)
{
	int fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);

	return fd < 0 ? -errno : fd;
}

int up_inotify_mark(int fd, int directory)
{
	char path[32];
	int watch;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", directory);
	watch = inotify_add_watch(fd, path, IN_OPEN | IN_ONLYDIR);
	return watch < 0 ? -errno : watch;
}

int up_inotify_unmark(int fd, int watch)
{
	return inotify_rm_watch(fd, watch) ? -errno : 0;
}

static int put(struct up_name_event *out, uint32_t kind, uint64_t directory, int32_t pid, const char *name,
	       size_t length)
{
	if (length >= sizeof(out->name))
		return 0;
	*out = (struct up_name_event){ .directory = directory, .pid = pid, .kind = kind,
		.name_bytes = (uint32_t)length };
	memcpy(out->name, name, length);
	return 1;
}

/* One event's, which has `length` bytes; how many it fills of `out`. */
static int fanotify_event(const struct fanotify_event_metadata *event, const char *at, size_t length,
			  struct up_name_event *out)
{
	size_t begins = event->metadata_len;
	struct info info;

	if (event->mask & FAN_Q_OVERFLOW)
		return put(out, UP_NAMES_LOST, 0, 0, "", 0);
	while (begins + sizeof(info) <= length) {
		size_t ends, name;

		memcpy(&info, at + begins, sizeof(info));
		ends = begins + info.length;
		name = begins + sizeof(info) + info.handle_bytes;
		if (info.length < sizeof(info) || ends > length || info.handle_bytes > HANDLE_BYTES)
			return 0;
		if (info.type == INFO_DIRECTORY_AND_NAME && name <= ends) {
			size_t bytes = strnlen(at + name, ends - name);
			uint64_t directory = identity(info.fsid, info.handle_type, at + begins + sizeof(info),
						      info.handle_bytes);

			if (bytes == 1 && at[name] == '.') /* the marked directory itself */
				bytes = 0;
			return put(out, event->mask & FAN_ONDIR ? UP_NAMES_DIRECTORY : UP_NAMES_FILE, directory,
				   event->pid, at + name, bytes);
		}
		begins = ends;
	}
	return 0;
}

int up_fanotify_read(int fd, struct up_name_event *out)
{
	char data[READ_BYTES];
	ssize_t got = read(fd, data, sizeof(data));
	int n = 0;

	if (got < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -errno;
	for (size_t at = 0; at + sizeof(struct fanotify_event_metadata) <= (size_t)got;) {
		struct fanotify_event_metadata event;

		memcpy(&event, data + at, sizeof(event));
		if (event.event_len < sizeof(event) || event.event_len > (size_t)got - at)
			break;
		if (event.fd >= 0)
			close(event.fd);
		n += fanotify_event(&event, data + at, event.event_len, out + n);
		at += event.event_len;
	}
	return n;
}

int up_inotify_read(int fd, struct up_name_event *out)
{
	char data[READ_BYTES];
	ssize_t got = read(fd, data, sizeof(data));
	int n = 0;

	if (got < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -errno;
	for (size_t at = 0; at + sizeof(struct inotify_event) <= (size_t)got;) {
		struct inotify_event event;
		const char *name = data + at + sizeof(event);

		memcpy(&event, data + at, sizeof(event));
		if (event.len > (size_t)got - at - sizeof(event))
			break;
		at += sizeof(event) + event.len;
		if (event.mask & IN_Q_OVERFLOW)
			n += put(out + n, UP_NAMES_LOST, 0, 0, "", 0);
		else if (event.mask & IN_IGNORED) /* its directory is gone, or it was removed */
			n += put(out + n, UP_NAMES_GONE, (uint64_t)event.wd, 0, "", 0);
		else if (event.mask & IN_OPEN)
			n += put(out + n, event.mask & IN_ISDIR ? UP_NAMES_DIRECTORY : UP_NAMES_FILE,
				 (uint64_t)event.wd, 0, name, strnlen(name, event.len));
	}
	return n;
}
