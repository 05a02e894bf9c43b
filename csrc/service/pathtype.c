// SPDX-License-Identifier: Apache-2.0
/*
 * pathtype.c - what is known of a file: its status, on which file system it lies, and whether that makes its bytes up.
 *
 * statfs(2) asks the server of NFS and of FUSE each time: it is asked once for a device.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>

#include "service/pathread.h"

/* CONFIGFS_MAGIC (fs/configfs/mount.c), which linux/magic.h lacks. */
#define CONFIGFS 0x62656570

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* With the lock, which is kept meanwhile: whoever comes for the same device does not ask as well. */
static int ask(int fd, uint64_t device, uint32_t *f_type)
{
	struct up_device *known = up_device_of(device);
	struct statfs fs;

	if (known && known->f_type) {
		*f_type = known->f_type;
		return 0;
	}
	if (fstatfs(fd, &fs))
		return -errno;
	*f_type = (uint32_t)fs.f_type;
	if (known)
		known->f_type = *f_type;
	return 0;
}

int up_path_type(int fd, uint64_t device, uint32_t *f_type)
{
	int ret;

	pthread_mutex_lock(&lock);
	ret = ask(fd, device, f_type);
	pthread_mutex_unlock(&lock);
	return ret;
}

int up_path_known_status(const char *path, struct up_path_status *out)
{
	struct statx st;

	/* FUSE forgets the time of access with each read, and asks its server for all that it has not. */
	if (statx(AT_FDCWD, path, AT_NO_AUTOMOUNT | AT_STATX_DONT_SYNC, STATX_BASIC_STATS, &st))
		return -errno;
	*out = (struct up_path_status){
		.device = makedev(st.stx_dev_major, st.stx_dev_minor),
		.inode = st.stx_ino,
		.size_bytes = st.stx_size,
		.mtime_ns = st.stx_mtime.tv_sec * 1000000000 + st.stx_mtime.tv_nsec,
		.mode = st.stx_mode,
	};
	return 0;
}

int up_path_is_made_up(uint32_t f_type)
{
	switch (f_type) {
	case PROC_SUPER_MAGIC:
	case SYSFS_MAGIC:
	case DEBUGFS_MAGIC:
	case TRACEFS_MAGIC:
	case SECURITYFS_MAGIC:
	case SELINUX_MAGIC:
	case CGROUP_SUPER_MAGIC:
	case CGROUP2_SUPER_MAGIC:
	case RDTGROUP_SUPER_MAGIC:
	case EFIVARFS_MAGIC:
	case PSTOREFS_MAGIC:
	case BPF_FS_MAGIC:
	case CONFIGFS:
		return 1;
	default:
		return 0;
	}
}
