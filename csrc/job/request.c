// SPDX-License-Identifier: Apache-2.0
/*
 * request.c - the job's threads ask the agent, and take regions back from it.
 *
 * The agent answers in microseconds. Where it does not (it waits for a far server, or is not
 * scheduled), or the service does not, a thread of the job waits 50 ms at most and goes on as if we
 * were not there; what it asked for is then taken back or left to the agent, never both. The agent
 * never waits for the job.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>

#include "job/preload.h"

/* Where even waiting is refused (a filter of the job's): looks that take about as long. */
#define REFUSED_LOOKS 20000
/* Interrupted as often as this in one step, it is over, too: the kernel tells us no time. */
#define INTERRUPTED_MAX 100
/* For a last look alone a thread waits no longer: a few times what it takes, where a core is free. */
#define LOOK_WAIT_NS (50 * 1000)
/* What another thread does to a region is usually over by then. */
#define EAGER_LOOKS 100

/* A child that no atfork handler saw (vfork, clone): the agent is not there. Its number alone does
 * not tell it: in a PID namespace of its own it may be the same. */
int up_in_own_process(void)
{
#ifdef UP_AGENT_PTHREAD
	/* A sanitizer's report maps files. In the agent's thread it must not ask the agent. */
	if (up_sys0(SYS_gettid) == atomic_load(&up_job.agent_tid))
		return 0;
#endif
	if (up_job.own_page && !atomic_load(up_job.own_page))
		return 0;
	return up_sys0(SYS_getpid) == up_job.pid;
}

struct patience {
	int steps, interrupted;
};

static struct patience all_patience(void)
{
	return (struct patience){ .steps = up_job.patience };
}

/* Wait while the word has this value, a step at most. No clock is asked: the kernel counts. */
static void wait_a_step(_Atomic uint32_t *word, uint32_t value, struct patience *p)
{
	struct timespec step = { .tv_nsec = UP_WAIT_STEP_NS };
	long ret = up_sys4(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &step);

	if (!up_failed(ret) || ret == -EAGAIN)
		return;
	if (ret == -EINTR && ++p->interrupted < INTERRUPTED_MAX)
		return;
	if (ret != -ETIMEDOUT && ret != -EINTR)
		for (int i = 0; i < REFUSED_LOOKS && atomic_load(word) == value; i++)
			__asm__ volatile("" ::: "memory");
	p->interrupted = 0;
	p->steps--;
}

/* Wait while the word that nobody wakes has this value: it is over soon. Not by yielding alone, which lets nobody
 * of a lower priority run. */
static void look_again(_Atomic uint32_t *word, uint32_t value, int looks, struct patience *p)
{
	if (looks < EAGER_LOOKS)
		up_sys0(SYS_sched_yield);
	else
		wait_a_step(word, value, p);
}

static struct up_request *claim_free_request(void)
{
	for (int i = 0; i < UP_REQUESTS; i++) {
		uint32_t is_free = UP_REQ_FREE;

		if (atomic_compare_exchange_strong(&up_job.request[i].state, &is_free,
						   UP_REQ_CLAIMED))
			return &up_job.request[i];
	}
	return NULL;
}

static struct up_request *claim_request(void)
{
	struct patience p = all_patience();

	for (;;) {
		struct up_request *q = claim_free_request();

		if (q)
			return q;
		if (!up_agent_alive() || atomic_load(&up_job.silent))
			return NULL;
		if (p.steps <= 0) { /* what all of these say it does not hear: not waited for by the next, too */
			atomic_store(&up_job.silent, 1);
			return NULL;
		}
		wait_a_step(&up_job.request[0].state, atomic_load(&up_job.request[0].state), &p);
	}
}

/* Nobody does anything there any more: 1. The agent lets go of what it holds when it comes to it. Where there is no
 * agent the slot stays what it is: what the kernel tells the responder of it is the job's. */
static int leave(struct up_region *r, uint32_t state)
{
	atomic_store(&up_job.left, 1); /* before it is: let_left_go() */
	if (!atomic_compare_exchange_strong(&r->state, &state, UP_LEFT))
		return 0;
	if (!up_agent_alive() && atomic_load(&r->state) == UP_LEFT)
		atomic_fetch_sub(&up_job.live, 1);
	return 1;
}

/* The region of this id is this thread's: 1. 0: another's, or it is as the agent has made it. The agent changes
 * nothing at its addresses before this thread says that it has done so itself. */
static int seize(struct up_region *r, uint32_t id)
{
	uint32_t hands = 1 + (uint32_t)(r - up_job.region), closing = UP_CLOSING;
	struct patience p = all_patience();

	if (atomic_load(&r->id) != id ||
	    !atomic_compare_exchange_strong(&r->state, &closing, UP_SEIZED))
		return 0;
	/* A few system calls that wait for no storage. */
	for (int i = 0; atomic_load(&up_job.hands) == hands && up_agent_alive(); i++)
		look_again(&up_job.hands, hands, i, &p);
	return 1;
}

/* The answer did not come. What this region is then, is told by its state, whoever sets it first. */
static int give_up(struct up_request *q, uint32_t op, uint32_t region)
{
	struct up_region *r = &up_job.region[region % UP_REGIONS];
	uint32_t posted = UP_REQ_POSTED, taken = UP_REQ_TAKEN;
	int left = 0, result;

	atomic_store(&up_job.silent, 1);
	if (atomic_compare_exchange_strong(&q->state, &posted, UP_REQ_FREE))
		return -ETIMEDOUT; /* nobody has seen it */
	if (op == UP_REQ_ATTACH)
		left = leave(r, UP_OPENING);
	else if (op == UP_REQ_DETACH || op == UP_REQ_FORGET || op == UP_REQ_SETTLE)
		left = seize(r, region);
	if (atomic_compare_exchange_strong(&q->state, &taken, UP_REQ_DROPPED))
		return left || op == UP_REQ_BYE || op == UP_REQ_QUIT ? -EINPROGRESS : 0;
	result = left ? -EINPROGRESS : q->result; /* it is done, just now */
	atomic_store(&q->state, UP_REQ_FREE);
	return result;
}

int up_ask(uint32_t op, uint32_t region, int job_fd)
{
	struct patience p = all_patience();
	struct up_request *q = claim_request();
	uint32_t state;
	int result = -ESRCH;

	if (!q)
		return up_agent_alive() ? -ETIMEDOUT : -ESRCH;
	q->op = op;
	q->region = region;
	q->job_fd = job_fd;
	q->awaited = 1;
	atomic_store(&q->state, UP_REQ_POSTED);
	/* One that did not answer the last time is not waited for again before it has come to. */
	if (up_agent_alive() && (up_failed(up_agent_ring_bell()) || atomic_load(&up_job.silent)))
		p.steps = 0;
	while (((state = atomic_load(&q->state)) == UP_REQ_POSTED || state == UP_REQ_TAKEN) &&
	       up_agent_alive()) {
		if (p.steps <= 0)
			return give_up(q, op, region);
		wait_a_step(&q->state, state, &p);
	}
	if (atomic_load(&q->state) == UP_REQ_DONE)
		result = q->result;
	atomic_store(&q->state, UP_REQ_FREE);
	return result;
}

/* Nobody waits for an answer. Whether the agent will hear it, unless it dies. */
static int tell(uint32_t op, uint32_t region, struct up_statement said)
{
	struct up_request *q = up_agent_alive() ? claim_free_request() : NULL;

	if (!q)
		return 0;
	q->op = op;
	q->region = region;
	q->statement = said;
	q->awaited = 0;
	atomic_store(&q->state, UP_REQ_POSTED);
	up_agent_ring_bell();
	return 1;
}

/* Nothing of ours is there that the agent must take away, but it may look at the mapping before that goes (lastlook.c).
 * Waited for LOOK_WAIT_NS once: if it has not begun by then it lets go of the region without a look, and of what it
 * finds later it forgets all (UP_REQ_DROPPED). Whether the agent will hear it, unless it dies. */
static int forget(uint32_t region)
{
	struct timespec step = { .tv_nsec = LOOK_WAIT_NS };
	struct up_statement nothing = { 0 };
	struct up_request *q = NULL;
	uint32_t state, posted = UP_REQ_POSTED, taken = UP_REQ_TAKEN;

	/* whether it is made or comes too late, it is one of those that may be waited for */
	if (!atomic_load(&up_job.silent) && atomic_load(&up_job.looks) > 0 && atomic_fetch_sub(&up_job.looks, 1) > 0)
		q = up_agent_alive() ? claim_free_request() : NULL;
	if (!q)
		return tell(UP_REQ_FORGET, region, nothing);
	q->op = UP_REQ_FORGET;
	q->region = region;
	q->statement = nothing;
	q->awaited = 1;
	atomic_store(&q->state, UP_REQ_POSTED);
	if (!up_failed(up_agent_ring_bell()))
		while ((state = atomic_load(&q->state)) == UP_REQ_POSTED || state == UP_REQ_TAKEN)
			if (up_sys4(SYS_futex, &q->state, FUTEX_WAIT_PRIVATE, state, &step) != -EAGAIN)
				break;
	if (atomic_compare_exchange_strong(&q->state, &posted, UP_REQ_FREE)) /* nobody has seen it */
		return tell(UP_REQ_FORGET, region, nothing);
	if (!atomic_compare_exchange_strong(&q->state, &taken, UP_REQ_DROPPED))
		atomic_store(&q->state, UP_REQ_FREE); /* DONE */
	return 1;
}

void up_state(uint32_t region, uint32_t what, uint64_t start, uint64_t end)
{
	tell(UP_REQ_STATE, region, (struct up_statement){ region, what, start, end });
}

int up_attach(struct up_region *r, int job_fd)
{
	uint32_t opening = UP_OPENING, live = UP_LIVE;
	int ret = up_ask(UP_REQ_ATTACH, r->id, job_fd);

	/* What is in progress the agent lets go of. One that died may have made it LIVE; then another thread
	 * may have taken it back already. */
	if (ret && ret != -EINPROGRESS &&
	    (atomic_compare_exchange_strong(&r->state, &opening, UP_FREE) ||
	     atomic_compare_exchange_strong(&r->state, &live, UP_FREE)))
		atomic_fetch_sub(&up_job.live, 1);
	return ret;
}

int up_agent_ready(void)
{
	struct patience p = all_patience();
	uint32_t none = 0;

	if (atomic_load(&up_job.disabled))
		return 0;
	if (atomic_compare_exchange_strong(&up_job.agent_start, &none, 1)) {
		if (atomic_load(&up_job.disabled) || up_agent_spawn())
			atomic_store(&up_job.disabled, 1);
		atomic_store(&up_job.agent_start, 2);
	}
	/* Another thread starts it, with its signals blocked: it will come to it, unless this one is
	 * a handler's on the same thread all the same. */
	while (atomic_load(&up_job.agent_start) == 1 && p.steps > 0)
		wait_a_step(&up_job.agent_start, 1, &p);
	return atomic_load(&up_job.agent_start) == 2 && up_agent_alive();
}

/* All signals are blocked while a thread waits. */
static int is_signalled(uint64_t blocked)
{
	uint64_t pending = 0;

	return !up_failed(up_sys2(SYS_rt_sigpending, &pending, sizeof(pending))) && (pending & ~blocked);
}

int up_await_swap(struct up_region *r, int *looks, uint64_t blocked)
{
	struct patience p = { .steps = *looks }, of_start = { .steps = UP_START_STEPS };
	uint32_t state;

	if (atomic_load(&up_job.service_silent))
		p.steps = 0;
	while ((state = atomic_load(&r->swap)) != UP_SWAP_DONE) {
		int starts = atomic_load(&up_job.service_starts) && !is_signalled(blocked);
		struct patience *now = starts ? &of_start : &p;
		uint32_t waiting = UP_SWAP_WAITING;

		/* Done, and the slot is another mapping's by now, whose thread has given up. */
		if (state == UP_SWAP_NONE) {
			*looks = 0;
			return 0;
		}
		if (!up_agent_alive() && atomic_load(&r->swap) != UP_SWAP_DONE)
			return -ESRCH;
		if (now->steps <= 0 &&
		    atomic_compare_exchange_strong(&r->swap, &waiting, UP_SWAP_NONE)) {
			atomic_store(&up_job.service_silent, 1);
			atomic_store(&up_job.service_starts, 0); /* it was waited for once */
			*looks = 0;
			return 0;
		}
		wait_a_step(&r->swap, state, now);
	}
	*looks = p.steps;
	return 0;
}

int up_map_from_anchor(struct up_region *r)
{
	long p = up_map_of_anchor(r), ret = p;

	if (!up_failed(p))
		ret = up_sys5(SYS_mremap, p, r->length, r->length, MREMAP_MAYMOVE | MREMAP_FIXED,
			      r->address);
	else
		ret = up_map_anchor_there(r);
	if (!up_failed(p) && up_failed(ret))
		up_sys2(SYS_munmap, p, r->length);
	return up_failed(ret) ? (int)ret : 0;
}

/* The file's own pages in place of the checkpoints': a shared mapping can be duplicated from any of its
 * pages (mremap(2) of no bytes), and the first is never a checkpoint. In a private one the checkpoints
 * stay; they hold the file's bytes and are private as well. */
static void duplicate_file(struct up_region *r)
{
	void *copy;

	if (atomic_load(&up_job.bypassed))
		return;
	copy = (void *)up_sys4(SYS_mremap, r->address, 0, r->length, MREMAP_MAYMOVE);
	if (!up_failed((long)copy))
		up_replace_checkpoints(r, (uintptr_t)copy);
}

/* Of a region that this thread has seized: the file's own pages, by the thread that is about to change that
 * very mapping, so nobody else can be doing so in a correct program. In the checkpoints' places alone:
 * between them the job may have mapped something without us, which no event tells of. What is unmapped
 * as a whole may be what it is. */
static void make_plain(struct up_region *r, uint32_t op)
{
	uintptr_t p = atomic_exchange(&r->replacement, 0);

	if (p) /* the agent has mapped it elsewhere */
		up_replace_checkpoints(r, p);
	else if (op == UP_REQ_DETACH && atomic_load(&r->laid) &&
		 (r->map_flags & MAP_TYPE) != MAP_PRIVATE)
		duplicate_file(r);
	p = atomic_exchange(&r->anchor, 0); /* not before: a child of fork(2) has the file from there */
	if (p)
		up_sys2(SYS_munmap, p, atomic_load(&r->anchor_bytes));
}

/* The file in the pool's place, by this thread: 0, or else the pool stays, in a part of it perhaps. */
static int leave_pool(struct up_region *r, uint32_t op)
{
	int ret;

	if (atomic_load(&up_job.bypassed) || up_is_patched()) /* nothing is done by address any more */
		return -EBUSY;
	if (atomic_load(&up_job.ending)) /* a filter of the job's may end it at any other call than these */
		return up_map_from_anchor(r);
	ret = up_put_back_apart(r, op == UP_REQ_SETTLE, 0);
	/* Which pages are copies is not known (docs/safety.md). */
	return ret && ret != -EBUSY ? up_map_from_anchor(r) : ret;
}

/* The agent does not make it plain: it is silent, or dead. */
static void take_back(struct up_region *r, uint32_t op)
{
	uint32_t seized = UP_SEIZED;

	if (atomic_load(&r->pooled) && leave_pool(r, op)) { /* it is served on */
		atomic_compare_exchange_strong(&r->state, &seized, UP_LIVE);
		return;
	}
	make_plain(r, op);
	leave(r, UP_SEIZED);
}

/* Another thread has it. What that does itself is some system calls that wait for no storage. */
void up_await_closed(struct up_region *r)
{
	struct patience p = all_patience();
	uint32_t state, id = atomic_load(&r->id);

	for (int i = 0; up_is_closing(state = atomic_load(&r->state)); i++) {
		int over = p.steps <= 0 || !up_agent_alive();

		if (atomic_load(&r->id) != id) /* another mapping's */
			return;
		if (state == UP_CLOSING && over && seize(r, id))
			take_back(r, UP_REQ_DETACH);
		else
			look_again(&r->state, state, i, &p);
	}
}

/* The agent has mapped the file elsewhere, and acts there no more. */
static void put_in_place(struct up_region *r, uint32_t id)
{
	uint32_t seized = UP_SEIZED;
	int ret;

	if (!seize(r, id))
		return;
	if (atomic_load(&r->pooled)) { /* it was LIVE again meanwhile, and another thread's */
		take_back(r, UP_REQ_DETACH);
		return;
	}
	make_plain(r, UP_REQ_DETACH);
	atomic_compare_exchange_strong(&r->state, &seized, UP_CLOSING);
	ret = up_ask(UP_REQ_FORGET, id, -1);
	if (ret == -EINPROGRESS || (ret && seize(r, id)))
		leave(r, UP_SEIZED);
}

/* Of a region that is CLOSING: the agent holds nothing of it, nothing of ours lies there and nothing is to be put back:
 * it does nothing at its addresses. */
static int is_bare(struct up_region *r)
{
	return r->settled && !atomic_load(&r->laid) && !atomic_load(&r->pooled) && !atomic_load(&r->anchor) &&
	       !atomic_load(&r->replacement);
}

int up_close_region(struct up_region *r, uint32_t op, uintptr_t address, size_t length)
{
	uint32_t live = UP_LIVE, id;
	int taken = atomic_compare_exchange_strong(&r->state, &live, UP_CLOSING), ret;

	if (taken && op == UP_REQ_SETTLE && atomic_load(&r->pooled) != UP_POOLED_COPIES) {
		atomic_store(&r->state, UP_LIVE); /* another mapping's meanwhile */
	} else if (taken) {
		atomic_fetch_add(&up_job.closings, 1);
		/* Only now does it stand still. If just a part of it goes (or the slot is another
		 * mapping's meanwhile), the rest stays a plain mapping. */
		if (op == UP_REQ_FORGET &&
		    (atomic_load(&r->pooled) || /* who touches it just now must not wait for ever */
		     address > r->address || address + length < r->address + r->map_length))
			op = UP_REQ_DETACH;
		id = atomic_load(&r->id);
		if (op == UP_REQ_FORGET && is_bare(r) && forget(id))
			return taken;
		ret = up_ask(op, id, -1);
		if (ret == 0 && op == UP_REQ_DETACH)
			put_in_place(r, id);
		/* Of a dead agent, too: the pool's memory the service goes on serving, but what the job is
		 * about to do is meant for the file; and checkpoints are mappings of their own, which
		 * mremap(2) refuses. Who waits there is woken when the service has read what it wanted. */
		else if (ret == -EINPROGRESS ||
			 ((ret == -ETIMEDOUT || ret == -ESRCH) && seize(r, id)))
			take_back(r, op);
	}
	up_await_closed(r); /* another thread may have waited long enough */
	return taken;
}

int up_overlaps(const struct up_region *r, uintptr_t address, size_t length)
{
	return address < r->address + r->map_length && r->address < address + length;
}

/* Before the kernel changes [address, +length): what is managed there becomes plain. With signals
 * blocked from the first such region on: a handler that leaves by siglongjmp must not leave one half
 * given back. What is not managed costs no system call. */
int up_give_back(uintptr_t address, size_t length, uint32_t op)
{
	int ours = 0, stays = 0;
	struct up_mask mask = { 0 };

	if (!atomic_load(&up_job.live) || !length)
		return 0;
	for (uint32_t i = 0; i < UP_REGIONS; i++) {
		struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);

		if ((state != UP_LIVE && !up_is_closing(state)) || !up_overlaps(r, address, length))
			continue;
		if (!ours && !up_in_own_process())
			return 0;
		if (!ours)
			mask = up_block_signals();
		ours = 1;
		up_close_region(r, op, address, length);
		stays |= atomic_load(&r->pooled) == UP_POOLED_COPIES;
	}
	if (ours)
		up_restore_signals(mask);
	return stays;
}

void up_settle(uintptr_t address, size_t length)
{
	for (uint32_t i = 0; i < UP_REGIONS && length && atomic_load(&up_job.live); i++) {
		struct up_region *r = &up_job.region[i];
		struct up_mask mask;

		if (atomic_load(&r->pooled) != UP_POOLED_COPIES || atomic_load(&r->state) != UP_LIVE ||
		    !up_overlaps(r, address, length) || !up_in_own_process())
			continue;
		mask = up_block_signals();
		up_close_region(r, UP_REQ_SETTLE, address, length);
		up_restore_signals(mask);
	}
}

void up_give_back_pool(void)
{
	for (uint32_t i = 0; i < UP_REGIONS && up_job.pool && atomic_load(&up_job.live); i++) {
		const struct up_region *r = &up_job.region[i];
		uint32_t state = atomic_load(&r->state);

		if ((state == UP_LIVE || up_is_closing(state)) && atomic_load(&r->pooled))
			up_give_back(r->address, r->map_length, UP_REQ_DETACH);
	}
}

/* Whether a thread of ours is there, or one of their numbers is somebody's in this process. */
static int are_there(int agent, int responder)
{
	return up_agent_alive() || up_sys3(SYS_tgkill, up_job.pid, agent, 0) == 0 ||
	       (responder && up_sys3(SYS_tgkill, up_job.pid, responder, 0) == 0);
}

/* End our threads before the job changes who it is: they would keep the old identity, and a new user
 * namespace is refused to a process with two threads. Where they do not end in time, they end as soon
 * as they can. */
static void end_agent(void)
{
	struct patience p = all_patience();
	_Atomic uint32_t nothing = 0;
	struct up_mask mask;
	int tid, responder;

	/* No agent, and none can come: nothing is asked. */
	if (!up_job.enabled ||
	    (atomic_load(&up_job.disabled) && !up_agent_alive() &&
	     !atomic_load(&up_job.responder_tid) && atomic_load(&up_job.agent_start) != 1))
		return;
	if (!up_in_own_process()) /* a vfork child's change of itself is not ours */
		return;
	atomic_store(&up_job.disabled, 1);
	mask = up_block_signals();
	while (atomic_load(&up_job.agent_start) == 1 && p.steps > 0) /* another thread starts it */
		wait_a_step(&up_job.agent_start, 1, &p);
	tid = atomic_load(&up_job.agent_tid);
	responder = atomic_load(&up_job.responder_tid);
	if (tid || responder) {
		atomic_store(&up_job.ending, 1);
		up_ask(UP_REQ_QUIT, 0, -1);
		for (int i = 0; i < 100 && are_there(tid, responder); i++) {
			if (!up_agent_alive())
				up_ring_responder();
			up_sys0(SYS_sched_yield);
		}
		for (p = all_patience(); p.steps > 0 && are_there(tid, responder);) {
			if (!up_agent_alive())
				up_ring_responder();
			wait_a_step(&nothing, 0, &p);
		}
	}
	up_restore_signals(mask);
}

void up_end_agent(void)
{
	end_agent();
#ifdef UP_AGENT_PTHREAD
	up_thread_await_end();
#endif
}

/* A file that is opened is perhaps mapped next, past us: that there are hooks is known before. */
void up_look_for_hooks(void)
{
	uint32_t none = 0;

	if (!up_job.enabled || atomic_load(&up_job.bypassed) || atomic_load(&up_job.disabled) ||
	    !up_is_patched() || !up_in_own_process() ||
	    !atomic_compare_exchange_strong(&up_job.bypassed, &none, UP_BYPASS_PATCHED))
		return;
	if (up_agent_ready()) /* which tells the service */
		up_agent_ring_bell();
}
