// SPDX-License-Identifier: Apache-2.0
/*
 * link.c - the agent's connection to the service, and what it says there (heard.c: what it hears).
 *
 * No call here blocks.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>

#include "job/agent.h"

#define CONNECT_RETRY_NS (10 * NS_PER_MS)
#define CONNECT_TRIES 200

static int send_message(struct agent *a, uint16_t type, struct up_message *m, int fd)
{
	struct iovec iov = { .iov_base = m, .iov_len = sizeof(*m) };
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
	long ret;

	m->header.magic = UP_MAGIC;
	m->header.version = UP_VERSION;
	m->header.type = type;
	if (fd >= 0) {
		msg.msg_control = control.space;
		msg.msg_controllen = sizeof(control.space);
		control.header.cmsg_len = CMSG_LEN(sizeof(int));
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		*(int *)CMSG_DATA(&control.header) = fd;
	}
	ret = up_sys3(SYS_sendmsg, a->socket, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
	/* ETOOMANYREFS: too many descriptors of this user are in flight just now. */
	if (ret == -EAGAIN || ret == -ETOOMANYREFS)
		return -EAGAIN;
	if (up_failed(ret))
		a->hung_up = 1;
	return up_failed(ret) ? (int)ret : 0;
}

/* The file without the job's description of it, whose locks (flock(2)) must end when the job has closed it:
 * the service may take its time, or stand still. Not where no block device is below it: of NFS and of 9p
 * the kernel may ask the server then (d_weak_revalidate). -errno: it cannot be had. */
static int file_alone(const struct up_region *r)
{
	int on_device = (r->device >> 8 & 0xfff) != 0;

	return r->fd >= 0 && on_device ? up_open_again(r->fd, O_PATH) : -1;
}

static int send_attach(struct agent *a, struct up_region *r)
{
	struct up_message m = { 0 };
	int ret, file;

	m.attach.region = r->id;
	m.attach.flags = (r->inherited ? UP_ATTACH_INHERITED : 0) |
			 (r->writable ? UP_ATTACH_WRITABLE : 0) |
			 (r->copies ? UP_ATTACH_COPIES : 0) |
			 (r->stated ? UP_ATTACH_STATED : 0) |
			 (r->known ? UP_ATTACH_KNOWN : 0) |
			 (r->many ? UP_ATTACH_MANY : 0) |
			 (r->brief ? UP_ATTACH_BRIEF : 0);
	m.attach.address = r->address;
	m.attach.length_bytes = r->length;
	m.attach.offset_bytes = r->offset;
	m.attach.device = r->device;
	m.attach.inode = r->inode;
	m.attach.size_bytes = r->size;
	m.attach.mtime_ns = r->mtime_ns;
	m.attach.map_flags = (uint32_t)r->map_flags;
	m.attach.advice = (uint32_t)r->advice;
	m.attach.anchor = atomic_load(&r->anchor);
	file = file_alone(r);
	ret = send_message(a, UP_ATTACH, &m, file >= 0 ? file : r->fd);
	up_close(&file);
	if (ret)
		return ret;
	r->sent = 1;
	up_unqueue(a, r);
	return 0;
}

/* Of how the job reads, not of a range. */
static int is_of_all(const struct up_statement *said)
{
	return said->what != UP_STATED_NEEDED && said->what != UP_STATED_UNNEEDED;
}

/* Ranges that touch each other become one, unless something else was said between the two: a hull of ranges
 * that lie apart would have read what nobody asked for. What does not fit is lost, as a hint may be. */
void up_note_statement(struct agent *a, const struct up_statement *said)
{
	if (!up_region_by_id(said->region))
		return;
	for (uint32_t i = a->stated; i-- > 0;) {
		struct up_statement *old = &a->statement[i];

		if (old->region != said->region || is_of_all(old) != is_of_all(said))
			continue;
		if (is_of_all(said)) { /* the last one holds */
			*old = *said;
			return;
		}
		if (old->what != said->what)
			break;
		if (said->start_bytes > old->end_bytes || old->start_bytes > said->end_bytes)
			continue;
		if (said->start_bytes < old->start_bytes)
			old->start_bytes = said->start_bytes;
		if (said->end_bytes > old->end_bytes)
			old->end_bytes = said->end_bytes;
		return;
	}
	if (a->stated < UP_STATEMENTS)
		a->statement[a->stated++] = *said;
}

/* In the order in which they came, of each mapping after its UP_ATTACH. */
static void send_statements(struct agent *a)
{
	uint32_t sent = 0, kept = 0;

	for (; sent < a->stated && !a->hung_up; sent++) {
		struct up_region *r = up_region_by_id(a->statement[sent].region);
		struct up_message m = { .statement = a->statement[sent] };

		if (r && (!r->sent || send_message(a, UP_STATED, &m, -1)))
			break;
	}
	for (; sent < a->stated; sent++)
		a->statement[kept++] = a->statement[sent];
	a->stated = kept;
}

/* Each region's before its UP_GONE, by which the service forgets it. */
static int send_touched(struct agent *a)
{
	uint32_t sent = 0, kept = 0;
	int ret = 0;

	for (; sent < a->touches; sent++) {
		struct up_message m = { .touched = a->touched[sent] };

		ret = send_message(a, UP_TOUCHED, &m, -1);
		if (ret)
			break;
	}
	for (; sent && sent + kept < a->touches; kept++)
		a->touched[kept] = a->touched[sent + kept];
	a->touches -= sent;
	return ret;
}

static int send_gone(struct agent *a, struct up_region *r)
{
	struct up_message m = { 0 };
	int ret;

	m.gone.region = r->id;
	m.gone.reason = atomic_load(&r->written)  ? UP_GONE_WRITTEN
			: atomic_load(&r->wanted) ? UP_GONE_WANTED
						  : UP_GONE_CHANGED;
	ret = send_message(a, UP_GONE, &m, -1);
	if (ret)
		return ret;
	up_unqueue(a, r);
	up_free_slot(r);
	return 0;
}

int up_acknowledge(struct agent *a, uint32_t sequence, uint32_t region, uint32_t done, int error)
{
	struct up_message m = { 0 };

	m.ack.sequence = sequence;
	m.ack.region = region;
	m.ack.done = done;
	m.ack.error = -error;
	m.ack.overlays = a->overlays;
	return send_message(a, UP_ACK, &m, -1);
}

static int say_refused(struct agent *a, struct up_region *r)
{
	int ret = up_acknowledge(a, 0, r->id, 0, -r->refused);

	if (ret)
		return ret;
	r->refused = 0;
	up_unqueue(a, r);
	return 0;
}

/* What is gone first: what is new may lie where it did. */
void up_flush(struct agent *a)
{
	if (!a->welcomed || send_touched(a))
		return;
	for (uint32_t i = 0; i < a->slots && a->pending && !a->hung_up; i++)
		if (atomic_load(&up_job.region[i].state) == UP_LEAVING && send_gone(a, &up_job.region[i]))
			return;
	for (uint32_t i = 0; i < a->slots && a->pending && !a->hung_up; i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);

		if ((state == UP_LIVE || (state == UP_CLOSING && r->asked)) && !r->sent &&
		    send_attach(a, r))
			return;
		if (state == UP_LIVE && r->refused && say_refused(a, r))
			return;
	}
	send_statements(a);
}

void up_introduce(struct up_hello *hello)
{
	hello->role = UP_AGENT;
	hello->pid = up_job.pid;
	hello->ppid = (int32_t)up_sys0(SYS_getppid);
	hello->rank = up_job.rank;
	hello->local_rank = up_job.local_rank;
	hello->world = up_job.world;
	hello->page_bytes = (uint32_t)up_job.page_bytes;
	for (unsigned int i = 0; i < sizeof(hello->command) - 1; i++)
		hello->command[i] = up_job.command[i];
}

static void say_hello(struct agent *a)
{
	struct up_message m = { 0 };

	up_introduce(&m.hello);
	m.hello.flags = (atomic_load(&a->uffd) >= 0 || a->pool_uffd >= 0 ? UP_HELLO_UFFD : 0) |
			(up_job.parent_pid ? UP_HELLO_FORKED : 0) |
			(a->pool_uffd >= 0 ? UP_HELLO_SENDS_POOL : 0);
	m.hello.uffd_error = a->uffd_error;
	m.hello.overlays_max = a->overlays_max;
	m.hello.parent_pid = up_job.parent_pid;
	send_message(a, UP_HELLO, &m, a->pool_uffd);
}

/* Since when the service that we have connected to is starting (CLOCK_REALTIME, s), 0: it is up. Until
 * it says so its lock file is empty (protocol/leftovers.py). */
static int64_t starts_since(void)
{
	char path[UP_LOCK_PATH_MAX];
	struct stat st;

	up_lock_path(path);
	return !up_failed(up_sys4(SYS_newfstatat, AT_FDCWD, path, &st, 0)) && !st.st_size ? st.st_mtim.tv_sec : 0;
}

/* Its start takes longer than a thread of the job waits for checkpoints: none waits in vain, until it
 * answers. What is mapped meanwhile is told to it then, and page tables show its readers. For the pool
 * a mapping does wait (up_await_swap), if it has not been starting for as long already. */
static void wait_for_start(struct agent *a, int64_t since)
{
	struct timespec now = { 0 };

	up_sys2(SYS_clock_gettime, CLOCK_REALTIME, &now);
	if (up_job.pool && now.tv_sec - since < UP_START_STEPS * (UP_WAIT_STEP_NS / 1000000) / 1000) {
		atomic_store(&up_job.service_starts, 1);
		return;
	}
	atomic_store(&up_job.service_silent, 1);
	for (uint32_t i = 0; i < a->slots; i++)
		if (atomic_load(&up_job.region[i].swap) == UP_SWAP_WAITING)
			up_swap_end(&up_job.region[i]);
}

void up_connect(struct agent *a)
{
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	int64_t since;
	long fd, ret;

	for (unsigned int i = 0; i < sizeof(sun.sun_path); i++)
		sun.sun_path[i] = up_job.socket_path[i];
	fd = up_sys3(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	ret = up_failed(fd) ? fd : up_sys3(SYS_connect, fd, &sun, sizeof(sun));
	if (!up_failed(ret)) {
		a->socket = (int)fd;
		say_hello(a);
		since = up_job.awaits_start ? 0 : starts_since();
		if (since)
			wait_for_start(a, since);
		return;
	}
	if (!up_failed(fd))
		up_sys1(SYS_close, fd);
	if (ret == -EAGAIN && ++a->connect_tries < CONNECT_TRIES)
		a->connect_at_ns = up_now_ns() + CONNECT_RETRY_NS;
	else
		a->hung_up = 1;
}

int up_say_bye(struct agent *a)
{
	struct up_message m = { 0 };

	return send_message(a, UP_BYE, &m, -1);
}

int up_say_bypass(struct agent *a)
{
	struct up_message m = { 0 };

	m.bypass.reason = atomic_load(&up_job.bypassed);
	return send_message(a, UP_BYPASS, &m, -1);
}
