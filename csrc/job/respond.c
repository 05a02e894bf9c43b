// SPDX-License-Identifier: Apache-2.0
/*
 * respond.c - the userfaultfd of the checkpoints: what it tells, and the thread that only listens to it.
 *
 * Two kinds of messages. A touch of an armed checkpoint: the page is continued first, and then told to
 * the service. A change of the address space at a checkpoint (UFFD_FEATURE_EVENT_UNMAP, _REMAP), which
 * nobody announced: before any change that passes through the interposers the agent has unregistered
 * the checkpoints (up_unlisten), so the process bypasses them.
 *
 * Facts of the kernel (Linux 6.18, fs/userfaultfd.c) that this rests on:
 *   - who changes the address space waits until the message is read; for ever when nobody reads, until
 *     the last descriptor is closed. Hence two readers.
 *   - while a message is unread, and until who changes the address space has run on, every
 *     UFFDIO_CONTINUE of that userfaultfd fails with EAGAIN.
 *   - read(2) gives faults first, then changes: so a fault that cannot be answered yet is kept, or
 *     dropped and its thread woken later, upon which it faults again.
 *   - closing the last descriptor unregisters whatever is registered, and wakes who waits.
 */
#include <errno.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>

#include "job/agent.h"

#define MESSAGES_AT_ONCE 16
/* Faults that wait for one message: one for each thread of a job, in the worst case. */
#define KEPT_MAX 128
/* Tries before we sleep a little between them: who changes the address space needs a CPU, too. */
#define EAGER_TRIES 200
#define TRY_AGAIN_NS 50000

struct kept_fault {
	uintptr_t address;
	uint64_t read_ns;
	uint32_t tid;
};

struct turn {
	struct kept_fault kept[KEPT_MAX];
	uint32_t count;
	uintptr_t dropped_low, dropped_high;
};

/* ------------------------------------------------------------------ telling the service */

static struct up_region *region_at(struct agent *a, uintptr_t address)
{
	uint32_t slots = atomic_load(&a->slots);

	for (uint32_t i = 0; i < slots; i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);

		if ((state == UP_LIVE || state == UP_CLOSING) && address - r->address < r->length)
			return r;
	}
	return NULL;
}

static void post(struct agent *a, const struct up_event *e)
{
	struct up_ring *ring = a->ring;
	uint64_t head, one = 1;
	int tries = 0, is_free = 0;

	if (!ring)
		return;
	/* The other one may be dead within: what is told is for speed only, so it may be lost. */
	while (!atomic_compare_exchange_strong(&a->posting, &is_free, 1)) {
		if (tries++ == EAGER_TRIES) {
			__atomic_fetch_add(&ring->dropped, 1, __ATOMIC_RELAXED);
			return;
		}
		is_free = 0;
		up_sys0(SYS_sched_yield);
	}
	head = ring->head;
	ring->faults++;
	if (head - __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE) >= UP_RING_EVENTS) {
		ring->dropped++;
	} else {
		ring->event[head % UP_RING_EVENTS] = *e;
		__atomic_store_n(&ring->head, head + 1, __ATOMIC_RELEASE);
	}
	atomic_store(&a->posting, 0);
	up_sys3(SYS_write, a->event_fd, &one, sizeof(one));
}

static void tell_touch(struct agent *a, const struct kept_fault *f)
{
	struct up_region *r = region_at(a, f->address);
	struct up_event e = { .time_ns = f->read_ns, .tid = f->tid };

	if (!r)
		return;
	e.handle_ns = (uint32_t)(up_now_ns() - f->read_ns);
	e.region = r->id;
	e.page = (r->offset + (f->address - r->address)) / up_job.page_bytes;
	/* The slot may have become another mapping's between the two. */
	if (region_at(a, f->address) == r && r->id == e.region)
		post(a, &e);
}

/* ------------------------------------------------------------------ answering */

/* 1: answered, 0: not yet. */
static int answer(struct agent *a, int uffd, const struct kept_fault *f)
{
	struct uffdio_continue cont = { .range = { f->address, up_job.page_bytes } };
	long ret;

	up_step(a, UP_STATE_RESOLVING);
	ret = up_sys3(SYS_ioctl, uffd, UFFDIO_CONTINUE, &cont);
	if (ret == -EAGAIN)
		return 0;
	/* EEXIST: somebody else's touch mapped it. ENOENT: it is registered no more. Its thread looks
	 * again, and the kernel decides. */
	if (up_failed(ret))
		up_wake_range(uffd, f->address, up_job.page_bytes);
	/* Anything else: the memfd's page is not there (EFAULT), against the rule that it is written
	 * before it is laid and never punched. Without us the kernel decides that, too. */
	if (up_failed(ret) && ret != -EEXIST && ret != -ENOENT && ret != -ESRCH && ret != -EBADF)
		up_close_overlays(a);
	tell_touch(a, f);
	return 1;
}

static void keep(struct turn *t, const struct uffd_msg *m)
{
	uintptr_t address = (uintptr_t)m->arg.pagefault.address & ~(up_job.page_bytes - 1);

	if (t->count < KEPT_MAX) {
		t->kept[t->count++] = (struct kept_fault){ address, up_now_ns(),
							   m->arg.pagefault.feat.ptid };
		return;
	}
	if (address < t->dropped_low)
		t->dropped_low = address;
	if (address + up_job.page_bytes > t->dropped_high)
		t->dropped_high = address + up_job.page_bytes;
}

/* A thread of the job that did not wait for us any longer: it has said so in its region. */
static int was_announced(struct agent *a, uintptr_t start, uintptr_t end)
{
	uint32_t slots = atomic_load(&a->slots);

	for (uint32_t i = 0; i < slots; i++) {
		const struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);

		if ((state == UP_CLOSING || up_is_left(state)) &&
		    r->address < end && start < r->address + r->map_length)
			return 1;
	}
	return 0;
}

/* Takes what waits; whether there was anything. */
static int take(struct agent *a, int uffd, struct turn *t)
{
	struct uffd_msg message[MESSAGES_AT_ONCE];
	long n = up_sys3(SYS_read, uffd, message, sizeof(message));

	/* Refused (a filter): who touches a checkpoint would wait for ever. */
	if (up_failed(n) && n != -EAGAIN && n != -EINTR && n != -EBADF)
		up_close_overlays(a);
	if (up_failed(n))
		return 0;
	n /= (long)sizeof(message[0]);
	for (long i = 0; i < n; i++) {
		if (message[i].event == UFFD_EVENT_PAGEFAULT)
			keep(t, &message[i]);
		else if (message[i].event == UFFD_EVENT_UNMAP &&
			 !was_announced(a, (uintptr_t)message[i].arg.remove.start,
					(uintptr_t)message[i].arg.remove.end))
			up_note_bypass(a, UP_BYPASS_UNMAPPED);
		else if (message[i].event == UFFD_EVENT_REMAP)
			up_note_bypass(a, UP_BYPASS_MOVED);
	}
	return n > 0;
}

void up_respond(struct agent *a)
{
	struct turn t = { .dropped_low = UINTPTR_MAX };
	int more, tries = 0;

	do {
		int uffd = atomic_load(&a->uffd);
		uint32_t left = 0;

		if (uffd < 0) /* closed: who waited goes on */
			return;
		more = take(a, uffd, &t);
		for (uint32_t i = 0; i < t.count; i++)
			if (!answer(a, uffd, &t.kept[i]))
				t.kept[left++] = t.kept[i];
		t.count = left;
		if (left && tries++ < EAGER_TRIES)
			up_sys0(SYS_sched_yield);
		else if (left)
			up_pause(TRY_AGAIN_NS);
	} while (t.count || more);
	if (t.dropped_low < t.dropped_high)
		up_wake_range(atomic_load(&a->uffd), t.dropped_low,
			      t.dropped_high - t.dropped_low);
	up_step(a, UP_STATE_IDLE);
}

void up_wake_laid(struct agent *a)
{
	uint32_t slots = atomic_load(&a->slots);

	/* Of any state: somebody may wait at a checkpoint that has just been taken away. */
	for (uint32_t i = 0; i < slots; i++)
		up_wake_range(atomic_load(&a->uffd), up_job.region[i].address,
			      up_job.region[i].length);
}

/* ------------------------------------------------------------------ the thread */

/* Not while the agent acts: who waits in munmap(2) for its event to be read must
 * not go on before. */
static void respond_alone(struct agent *a)
{
	uint64_t until = up_now_ns() + UP_TAKE_OVER_NS;

	atomic_store(&a->reading, 1);
	while (atomic_load(&a->acting) && up_agent_alive() && up_now_ns() < until)
		up_sys0(SYS_sched_yield);
	up_respond(a);
	atomic_store(&a->reading, 0);
}

static void responder_main(void)
{
	struct agent *a = &up_agent;
	uint32_t events[UP_SOURCES];
	int alone = 0;

	up_sys2(SYS_prctl, PR_SET_NAME, "uffdprefetch/r");
	atomic_store(&a->reading, 0); /* of one that died */
	/* Where the agent has died nobody else ends us. */
	while (!atomic_load(&a->stop) && (up_agent_alive() || !atomic_load(&up_job.ending))) {
		if (atomic_load(&a->uffd) < 0)
			break;
		up_wait(&a->listen, UP_ALONE_LOOK_NS, events);
		if (!alone && !up_agent_alive()) {
			alone = 1;
			up_wake_laid(a); /* what it has read and not answered comes again */
		}
		if (events[UP_OVERLAYS_TELL])
			respond_alone(a);
		if (events[UP_BELL_RINGS]) /* what was sent to this thread */
			up_take_bell(a);
	}
}

int up_responder_spawn(struct agent *a)
{
	int ret = 0;

	up_notice_responder_end(a);
	if (!atomic_load(&up_job.responder_tid))
		ret = up_thread_spawn(responder_main, &up_job.responder_stack,
				      &up_job.responder_tid);
	a->responds = !ret;
	return ret;
}

void up_notice_responder_end(struct agent *a)
{
	if (!a->responds || atomic_load(&up_job.responder_tid))
		return;
	a->responds = 0;
	up_wake_laid(a);
}

/* A responder that is stopped by a tracer ends when it goes on: its next look finds ``stop``. */
void up_responder_end(struct agent *a)
{
	atomic_store(&a->stop, 1);
	for (int i = 0; i < 50 && atomic_load(&up_job.responder_tid); i++) {
		up_ring_responder();
		up_pause(NS_PER_MS);
	}
}
