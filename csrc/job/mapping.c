// SPDX-License-Identifier: Apache-2.0
/*
 * mapping.c - mmap and its kin: which mappings are managed, and what the job may do with one.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include "common/madvise.h"
#include "job/preload.h"
#include "common/status.h"

/* What is said of a range of less is not told: the kernel itself reads that all at once (read_ahead_kb is 128 by
 * default), and programs that drop each record say it often. */
#define STATED_LEAST_BYTES (256 << 10)
#ifndef MAP_32BIT /* AArch64 */
#define MAP_32BIT 0
#endif
#define HUGE_BYTES ((size_t)2 << 20)
/* What is read at a time is in memory as a whole, or not; to ask of each page takes as long as to map it. */
#define LOOK_BYTES (256 << 10)
/* Less than this part missing is nothing to stream for (LITTLE_SHARE, uffdprefetch/predict/visits.py). */
#define LITTLE_SHARE 64
/* Of mappings that need not be told of, since those like them went within moments and nothing was gained, one in so
 * many is all the same: it tells when that is over (service/brief.py). What stays of the others is found in /proc. */
#define BRIEF_SHARE 16
#ifndef MAP_SHARED_VALIDATE
#define MAP_SHARED_VALIDATE 3
#endif

/* As the kernel counts: np.memmap unmaps the bytes of its file, not the pages of its mapping. */
static size_t whole_pages(size_t length)
{
	return (length + up_job.page_bytes - 1) & ~(up_job.page_bytes - 1);
}

/* Of a mapping of so much: up to the last page of the file. */
static size_t mapped_bytes(size_t length, off_t offset, const struct stat *st)
{
	uint64_t bytes = (uint64_t)(st->st_size - offset);

	return whole_pages(bytes < length ? (size_t)bytes : length);
}

static int large_enough(const struct stat *st, off_t offset)
{
	return st->st_size > offset && (uint64_t)(st->st_size - offset) >= up_job.min_bytes;
}

/* Its pages may become copies of the job's own: nothing of ours ever lies there. What the job writes
 * to a shared one the file gets: that is not a reader. */
static int makes_copies(int prot, int flags)
{
	return prot == (PROT_READ | PROT_WRITE) && (flags & MAP_TYPE) == MAP_PRIVATE;
}

static int eligible(size_t length, int prot, int flags, int fd, off_t offset, struct stat *st)
{
	int type = flags & MAP_TYPE;
	int unfit = MAP_ANONYMOUS | MAP_HUGETLB | MAP_GROWSDOWN | MAP_LOCKED;

	if ((!up_job.enabled && !up_alone) || atomic_load(&up_job.disabled) ||
	    atomic_load(&up_job.bypassed) || fd < 0 ||
	    (prot != PROT_READ && !makes_copies(prot, flags)) || (flags & unfit) ||
	    length < up_job.min_bytes ||
	    (type != MAP_SHARED && type != MAP_PRIVATE && type != MAP_SHARED_VALIDATE) ||
	    !up_in_own_process())
		return 0;
	if (offset < 0 || up_failed(up_cached_stat(fd, st)) || !S_ISREG(st->st_mode))
		return 0;
	/* A client that has not asked for the size since it opened the file may know a smaller one. */
	if (!large_enough(st, offset) &&
	    (up_failed(up_sys2(SYS_fstat, fd, st)) || !large_enough(st, offset)))
		return 0;
	if (up_alone)
		up_say_alone();
	return !up_alone;
}

/* Where the mapping can have huge pages when the pool does: at the same place in one as its bytes have
 * in the file. NULL: no such wish. Between this and mmap() another thread may take it: then the
 * kernel finds another place. */
static void *huge_place(size_t length, uint64_t offset)
{
	size_t room = length + HUGE_BYTES;
	uintptr_t at;
	void *p;

	if (length < HUGE_BYTES || room < length)
		return NULL;
	p = up_mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (up_failed((long)p))
		return NULL;
	at = (uintptr_t)p;
	at += (offset - at) % HUGE_BYTES;
	up_sys2(SYS_munmap, p, room);
	return (void *)at;
}

static struct up_region *claim_region(void)
{
	for (uint32_t i = 0; i < UP_REGIONS; i++) {
		uint32_t is_free = UP_FREE;

		if (!atomic_compare_exchange_strong(&up_job.region[i].state, &is_free, UP_OPENING))
			continue;
		atomic_fetch_add(&up_job.live, 1);
		up_job.region[i].id =
			i | (atomic_fetch_add(&up_job.generation, 1) + 1) % 0x3fffff << 10;
		return &up_job.region[i];
	}
	return NULL;
}

/* Whether MAP_POPULATE may become what its manual page calls it, a hint. Of a private mapping that can be
 * written the kernel makes the copies by it, and what is O_RDWR may be read beside its writer. */
static int may_come_later(int prot, int flags, int fd)
{
	long status;

	if (!(flags & MAP_POPULATE) || prot != PROT_READ || up_job.keep_advice)
		return 0;
	status = up_sys3(SYS_fcntl, fd, F_GETFL, 0);
	return !up_failed(status) && (status & O_ACCMODE) == O_RDONLY && !(status & O_PATH);
}

/* Nobody streams it: as the kernel would have. Before Linux 5.14 less of it. */
static void populate(void *p, size_t length)
{
	if (up_failed(up_sys3(SYS_madvise, p, length, MADV_POPULATE_READ)))
		up_sys3(SYS_madvise, p, length, MADV_WILLNEED);
}

/* Whether as good as all of the mapping is in memory, by one page in LOOK_BYTES: then there is nothing to stream,
 * and what the job has asked for costs no more than the faults that it spares. Of another user's file mincore(2)
 * does not tell (mm/mincore.c, can_do_mincore), and says that all of it is. */
static int is_cached(void *p, size_t length, const struct stat *st)
{
	size_t missing_most = length / LOOK_BYTES / LITTLE_SHARE, missing = 0;
	unsigned char there = 0;

	if (st->st_uid != (uid_t)up_sys0(SYS_geteuid))
		return 0;
	for (size_t at = 0; at < length && missing <= missing_most; at += LOOK_BYTES) {
		if (up_failed(up_sys3(SYS_mincore, (char *)p + at, up_job.page_bytes, &there)))
			return 0;
		missing += !(there & 1);
	}
	return missing <= missing_most;
}

static int64_t mtime_ns(const struct stat *st)
{
	return (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
}

/* What the service has said of this file: its mark in up_job.settled, or 0. */
static uint64_t settled_mark(const struct stat *st)
{
	uint64_t mark = up_file_mark((uint64_t)st->st_dev, (uint64_t)st->st_ino, (uint64_t)st->st_size, mtime_ns(st));

	for (int i = 0; i < UP_SETTLED; i++) {
		uint64_t said = atomic_load(&up_job.settled[i]);

		if ((said & ~1ull) == mark)
			return said;
	}
	return 0;
}

/* The mapping exists and nobody knows its address yet: hand it to the agent. Whether that has it. */
static int adopt(void *p, size_t length, int prot, int flags, int fd, off_t offset,
		 const struct stat *st, int stated, uint64_t blocked)
{
	long status = up_sys3(SYS_fcntl, fd, F_GETFL, 0);
	uint64_t settled = settled_mark(st);
	size_t bytes = mapped_bytes(length, offset, st);
	uint32_t brief = atomic_load(&up_job.brief[up_size_of(bytes)]);
	int looks = up_job.patience, waits;
	struct up_region *r;

	if ((settled & UP_SETTLED_REFUSED) || up_failed(status) || (status & O_ACCMODE) == O_WRONLY || (status & O_PATH) ||
	    !up_agent_ready())
		return 0;
	if (brief == UP_BRIEF_UNTOLD && !stated && atomic_fetch_add(&up_job.briefs, 1) % BRIEF_SHARE)
		return 0;
	/* Checkpoints, and the pool's memory, are laid while nobody knows the address. */
	waits = !up_job.no_uffd && (status & O_ACCMODE) != O_RDWR && !(flags & MAP_FIXED) &&
		prot == PROT_READ &&
		!atomic_load(&up_job.shared) &&
		(up_job.pool || (up_job.listen_bytes && length >= up_job.listen_bytes));
	r = claim_region();
	if (!r)
		return 0;
	r->address = (uintptr_t)p;
	r->map_length = whole_pages(length);
	r->length = bytes;
	r->offset = (uint64_t)offset;
	r->device = (uint64_t)st->st_dev;
	r->inode = (uint64_t)st->st_ino;
	r->size = (uint64_t)st->st_size;
	r->mtime_ns = mtime_ns(st);
	r->prot = prot;
	r->map_flags = flags;
	r->advice = MADV_NORMAL;
	r->writable = (status & O_ACCMODE) == O_RDWR;
	r->copies = prot != PROT_READ;
	r->stated = stated;
	r->settled = waits && settled;
	waits = waits && !settled;
	r->brief = waits && brief != UP_BRIEF_NO;
	waits = waits && !r->brief;
	r->known = !waits;
	atomic_store(&r->unleased, 0);
	atomic_store(&r->written, 0);
	r->many = 0;
	r->waits_since_ns = 0;
	r->inherited = 0;
	atomic_store(&r->laid, 0);
	atomic_store(&r->replacement, 0);
	atomic_store(&r->swap, waits ? UP_SWAP_WAITING : UP_SWAP_NONE);
	atomic_store(&r->pooled, 0);
	atomic_store(&r->anchor, 0);
	atomic_store(&r->wanted, 0);
	r->fd = r->pool_fd = -1;
	r->mode = r->sent = r->queued = 0;
	r->refused = 0;
	r->asked = NULL;
	if (up_attach(r, fd))
		return 0;
	if (waits && up_await_swap(r, &looks, blocked)) {
		/* The agent died over it: nobody knows what lies there now. */
		up_mmap(p, length, prot, (flags & (MAP_TYPE | MAP_NORESERVE)) | MAP_FIXED, fd,
			(uint64_t)offset);
		atomic_store(&r->pooled, 0);
	}
	return 1;
}

static void *map(void *address, size_t length, int prot, int flags, int fd, off_t offset)
{
	int saved = errno, later, served = 0, stays = 0;
	struct stat st;
	void *p;

	if (__builtin_expect(up_own_locks, 0))
		up_lock_mapped();
	later = may_come_later(prot, flags, fd) && eligible(length, prot, flags, fd, offset, &st);
	if (later)
		flags &= ~MAP_POPULATE;
	if (up_job.pool && prot == PROT_READ && !address && !(flags & (MAP_FIXED | MAP_32BIT)) &&
	    eligible(length, prot, flags, fd, offset, &st))
		address = huge_place(length, (uint64_t)offset);
	if (flags & MAP_FIXED)
		stays = up_give_back((uintptr_t)address, length, UP_REQ_DETACH);
	errno = saved;
	p = up_next.mmap ? up_next.mmap(address, length, prot, flags, fd, offset)
		      : (void *)up_fail((long)up_mmap(address, length, prot, flags, fd,
						   (uint64_t)offset));
	if (p == MAP_FAILED)
		return p;
	saved = errno;
	if (stays)
		up_settle((uintptr_t)address, length);
	/* Before anything is laid there. The pool's memory takes the place of what would be mapped. */
	if (later && !up_job.pool) {
		size_t bytes = mapped_bytes(length, offset, &st);

		if (is_cached(p, bytes, &st))
			populate(p, bytes);
	}
	if (eligible(length, prot, flags, fd, offset, &st)) {
		/* A handler may map, too, or leave by siglongjmp: not in the middle of this. */
		struct up_mask mask = up_block_signals();

		served = mask.blocked && adopt(p, length, prot, flags, fd, offset, &st, later, mask.before);
		up_restore_signals(mask);
	}
	if (later && !served)
		populate(p, length);
	errno = saved;
	return p;
}

UP_EXPORT void *mmap(void *address, size_t length, int prot, int flags, int fd, off_t offset)
{
	return map(address, length, prot, flags, fd, offset);
}

UP_EXPORT void *mmap64(void *address, size_t length, int prot, int flags, int fd, off64_t offset)
{
	return map(address, length, prot, flags, fd, offset);
}

UP_EXPORT int munmap(void *address, size_t length)
{
	int saved = errno, stays = 0, ret;

	/* Off the page it fails, and what is managed there stays. */
	if (!((uintptr_t)address & (up_job.page_bytes - 1)))
		stays = up_give_back((uintptr_t)address, whole_pages(length), UP_REQ_FORGET);
	errno = saved;
	ret = up_next.munmap ? up_next.munmap(address, length)
			     : (int)up_fail(up_sys2(SYS_munmap, address, length));
	if (stays && !ret)
		up_settle((uintptr_t)address, whole_pages(length));
	return ret;
}

UP_EXPORT void *mremap(void *old, size_t old_length, size_t length, int flags, ...)
{
	int saved = errno, stays = 0;
	void *target = NULL, *p;
	va_list ap;

	if (flags & MREMAP_FIXED) {
		va_start(ap, flags);
		target = va_arg(ap, void *);
		va_end(ap);
		stays = up_give_back((uintptr_t)target, length, UP_REQ_DETACH);
	}
	/* mremap of a single page (old_length 0 duplicates a shared mapping) is no special case. */
	stays |= up_give_back((uintptr_t)old, old_length ? old_length : 1, UP_REQ_DETACH);
	errno = saved;
	p = up_next.mremap ? up_next.mremap(old, old_length, length, flags, target)
			   : (void *)up_fail(up_sys5(SYS_mremap, old, old_length, length, flags, target));
	if (p == MAP_FAILED || !stays)
		return p;
	if (flags & MREMAP_FIXED)
		up_settle((uintptr_t)target, length);
	if (length < old_length)
		up_settle((uintptr_t)old + whole_pages(length), old_length - length);
	return p;
}

/* Whether all that is managed there has these rights already: then nothing changes. */
static int has_rights(uintptr_t address, size_t length, int prot)
{
	for (uint32_t i = 0; i < UP_REGIONS && atomic_load(&up_job.live); i++) {
		const struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);

		if ((state == UP_LIVE || up_is_closing(state)) &&
		    up_overlaps(r, address, length) && r->prot != prot)
			return 0;
	}
	return 1;
}

UP_EXPORT int mprotect(void *address, size_t length, int prot)
{
	int saved = errno;

	if (!has_rights((uintptr_t)address, length, prot))
		up_give_back((uintptr_t)address, length, UP_REQ_DETACH);
	errno = saved;
	if (up_next.mprotect)
		return up_next.mprotect(address, length, prot);
	return (int)up_fail(up_sys3(SYS_mprotect, address, length, prot));
}

UP_EXPORT int pkey_mprotect(void *address, size_t length, int prot, int key)
{
	int saved = errno;

	up_give_back((uintptr_t)address, length, UP_REQ_DETACH);
	errno = saved;
	if (up_next.pkey_mprotect)
		return up_next.pkey_mprotect(address, length, prot, key);
	return (int)up_fail(up_sys4(SYS_pkey_mprotect, address, length, prot, key));
}

/* What advice that is done with at once says of a range (enum up_stated). 0: the mapping keeps it, so it must hold
 * for all kinds of pages that lie there. */
static uint32_t stated_of_range(int advice)
{
	switch (advice) {
	case MADV_WILLNEED:
	case MADV_POPULATE_READ:
		return UP_STATED_NEEDED;
	case MADV_DONTNEED:
	case MADV_COLD:
	case MADV_PAGEOUT:
		return UP_STATED_UNNEEDED;
	}
	return 0;
}

/* How the job will read a mapping. */
static void state_all(struct up_region *r, int advice)
{
	uint64_t offset = atomic_load(&r->offset);
	uint32_t said = UP_STATED_NORMAL;

	if (advice == MADV_RANDOM)
		said = UP_STATED_RANDOM;
	else if (advice == MADV_SEQUENTIAL)
		said = UP_STATED_SEQUENTIAL;
	up_state(r->id, said, offset, offset + r->length);
}

/* What kept advice does to a managed region. */
static void advise_region(struct up_region *r, uintptr_t address, size_t length, int advice)
{
	int whole = address <= r->address && address + length >= r->address + r->length;

	/* Other advice must lie over one kind of pages. */
	if (!whole || (advice != MADV_NORMAL && advice != MADV_RANDOM && advice != MADV_SEQUENTIAL)) {
		up_close_region(r, UP_REQ_DETACH, address, length);
		return;
	}
	r->advice = advice;
	state_all(r, advice);
}

/* To all that is managed in the range. */
static void advise_regions(uintptr_t address, size_t length, int advice)
{
	int ours = 0;
	struct up_mask mask = { 0 };

	for (uint32_t i = 0; i < UP_REGIONS && length && atomic_load(&up_job.live); i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);

		if ((state != UP_LIVE && !up_is_closing(state)) || !up_overlaps(r, address, length))
			continue;
		if (!ours && !up_in_own_process())
			break;
		if (!ours)
			mask = up_block_signals();
		ours = 1;
		if (state != UP_LIVE)
			up_await_closed(r);
		else
			advise_region(r, address, whole_pages(length), advice);
	}
	if (ours)
		up_restore_signals(mask);
}

/* The job has said it of a range. (Of MADV_WILLNEED the kernel reads the beginning at most, see
 * force_page_cache_readahead(), and on some network file systems nothing.) */
static void state_range(uintptr_t address, size_t length, uint32_t what)
{
	int ours = 0;

	if (length < STATED_LEAST_BYTES || address + length < address)
		return;
	for (uint32_t i = 0; i < UP_REGIONS && atomic_load(&up_job.live); i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t id = atomic_load(&r->id);
		uintptr_t start = atomic_load(&r->address), end = start + atomic_load(&r->length);
		uint64_t offset = atomic_load(&r->offset) - start;

		if (atomic_load(&r->state) != UP_LIVE || atomic_load(&r->id) != id)
			continue;
		if (start < address)
			start = address;
		if (end > address + length)
			end = address + length;
		if (start >= end)
			continue;
		if (!ours && !up_in_own_process())
			return;
		ours = 1;
		up_state(id, what, start + offset, end + offset);
	}
}

static int advise_kernel(void *address, size_t length, int advice)
{
	if (up_next.madvise)
		return up_next.madvise(address, length, advice);
	return (int)up_fail(up_sys3(SYS_madvise, address, length, advice));
}

UP_EXPORT int madvise(void *address, size_t length, int advice)
{
	uint32_t closings = atomic_load(&up_job.closings), said = stated_of_range(advice);
	int saved = errno, ret;

	/* What the kernel refuses (mm/madvise.c) is no advice. */
	if (!atomic_load(&up_job.live) || (uintptr_t)address % up_job.page_bytes ||
	    (uintptr_t)address + whole_pages(length) < (uintptr_t)address)
		return advise_kernel(address, length, advice);
	if (said == UP_STATED_NEEDED)
		state_range((uintptr_t)address, length, said);
	if (said) {
		ret = advise_kernel(address, length, advice);
		saved = errno;
		/* Not before: what was still mapped would look like what it reads again. */
		if (!ret && said == UP_STATED_UNNEEDED)
			state_range((uintptr_t)address, length, said);
		errno = saved;
		return ret;
	}
	advise_regions((uintptr_t)address, length, advice);
	errno = saved;
	ret = advise_kernel(address, length, advice);
	/* What was given back meanwhile has, page by page, the advice that it had when that began. */
	if (!ret && advice <= MADV_SEQUENTIAL && closings != atomic_load(&up_job.closings)) {
		advise_regions((uintptr_t)address, length, advice);
		advise_kernel(address, length, advice);
	}
	errno = ret ? errno : saved;
	return ret;
}

UP_EXPORT ssize_t process_madvise(int pidfd, const struct iovec *ranges, size_t count, int advice, unsigned int flags)
{
	int saved = errno;

	up_before_process_madvise(ranges, count, advice);
	errno = saved;
	if (up_next.process_madvise)
		return up_next.process_madvise(pidfd, ranges, count, advice, flags);
	return up_fail(up_sys5(SYS_process_madvise, pidfd, ranges, count, advice, flags));
}

UP_EXPORT int posix_madvise(void *address, size_t length, int advice)
{
	int saved = errno, ret = 0;

	/* POSIX_MADV_DONTNEED does nothing in glibc; the other numbers are madvise's. */
	if (advice == POSIX_MADV_DONTNEED)
		state_range((uintptr_t)address, length, UP_STATED_UNNEEDED);
	else if (madvise(address, length, advice))
		ret = errno;
	errno = saved;
	return ret;
}

UP_EXPORT int mlock(const void *address, size_t length)
{
	int saved = errno;

	up_give_back((uintptr_t)address, length, UP_REQ_DETACH);
	errno = saved;
	return up_next.mlock ? up_next.mlock(address, length)
			  : (int)up_fail(up_sys2(SYS_mlock, address, length));
}

UP_EXPORT int mlock2(const void *address, size_t length, unsigned int flags)
{
	int saved = errno;

	up_give_back((uintptr_t)address, length, UP_REQ_DETACH);
	errno = saved;
	return up_next.mlock2 ? up_next.mlock2(address, length, flags)
			   : (int)up_fail(up_sys3(SYS_mlock2, address, length, flags));
}

UP_EXPORT int mlockall(int flags)
{
	int saved = errno;

	up_all_is_locked();
	errno = saved;
	return up_next.mlockall ? up_next.mlockall(flags) : (int)up_fail(up_sys1(SYS_mlockall, flags));
}

UP_EXPORT int remap_file_pages(void *address, size_t length, int prot, size_t page, int flags)
{
	int saved = errno;

	up_give_back((uintptr_t)address, length, UP_REQ_DETACH);
	errno = saved;
	if (up_next.remap_file_pages)
		return up_next.remap_file_pages(address, length, prot, page, flags);
	return (int)up_fail(up_sys5(SYS_remap_file_pages, address, length, prot, page, flags));
}

/* ------------------------------------------------------------------ what hooks overwrite */

/* Their first bytes are compared with what they were (bypass.c). By names of our own: those that are
 * exported may be another library's. */
#define OWN(name) \
	extern __typeof__(name) own_##name \
		__attribute__((alias(#name), copy(name), visibility("hidden")))
OWN(mmap);
OWN(munmap);
OWN(mremap);
OWN(mprotect);
OWN(madvise);
#undef OWN

const void *const up_entry[UP_ENTRIES_MAX] = {
	(const void *)own_mmap, (const void *)own_munmap, (const void *)own_mremap,
	(const void *)own_mprotect, (const void *)own_madvise,
};
const int up_entry_count = 5;

#define LIMIT(name, call, pid, old, sets)                                                          \
	int saved = errno;                                                                         \
                                                                                                   \
	up_before_limit((int)resource, sets);                                                      \
	errno = saved;                                                                             \
	return up_next.name ? up_next.call                                                         \
			    : (int)up_fail(up_sys4(SYS_prlimit64, pid, resource, limit, old))

UP_EXPORT UP_EARLY int setrlimit(__rlimit_resource_t resource, const struct rlimit *limit)
{
	LIMIT(setrlimit, setrlimit(resource, limit), 0, NULL, 1);
}

UP_EXPORT UP_EARLY int setrlimit64(__rlimit_resource_t resource, const struct rlimit64 *limit)
{
	LIMIT(setrlimit64, setrlimit64(resource, limit), 0, NULL, 1);
}

UP_EXPORT UP_EARLY int prlimit(pid_t pid, enum __rlimit_resource resource, const struct rlimit *limit, struct rlimit *old)
{
	LIMIT(prlimit, prlimit(pid, resource, limit, old), pid, old, limit != NULL);
}

UP_EXPORT UP_EARLY int prlimit64(pid_t pid, enum __rlimit_resource resource, const struct rlimit64 *limit, struct rlimit64 *old)
{
	LIMIT(prlimit64, prlimit64(pid, resource, limit, old), pid, old, limit != NULL);
}
