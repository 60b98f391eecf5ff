// The gallery's memory: finished works in this browser's IndexedDB, newest first.

const NAME = "sglang-gallery";
const KEPT = 500;

function open() {
  return new Promise((resolve, reject) => {
    const asking = indexedDB.open(NAME, 1);
    asking.onupgradeneeded = () => {
      const db = asking.result;
      db.createObjectStore("works", { keyPath: "id" }).createIndex("created", "created");
      db.createObjectStore("jobs", { keyPath: "id" }); // videos under way: a reload finds them again
    };
    asking.onsuccess = () => resolve(asking.result);
    asking.onerror = () => reject(asking.error);
  });
}

function settled(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
    transaction.onerror = () => reject(transaction.error);
  });
}

function answered(asking) {
  return new Promise((resolve, reject) => {
    asking.onsuccess = () => resolve(asking.result);
    asking.onerror = () => reject(asking.error);
  });
}

let opened = null;
const database = () => (opened ??= open());

async function write(store, action) {
  const transaction = (await database()).transaction(store, "readwrite");
  action(transaction.objectStore(store));
  await settled(transaction);
}

/** Keep a work; beyond a bound the oldest go. Returns the ids of those. */
export async function keep(work) {
  await write("works", (store) => store.put(work));
  const works = await all();
  const old = works.slice(KEPT).map((each) => each.id);
  if (old.length) await remove(old);
  return old;
}

/** All works, newest first. */
export async function all() {
  const store = (await database()).transaction("works").objectStore("works");
  return (await answered(store.index("created").getAll())).reverse();
}

export const remove = (ids) => write("works", (store) => ids.forEach((id) => store.delete(id)));
export const clear = () => write("works", (store) => store.clear());

/** Jobs that go on without this page. */
export const jobs = {
  keep: (job) => write("jobs", (store) => store.put(job)),
  remove: (id) => write("jobs", (store) => store.delete(id)),
  all: async () => answered((await database()).transaction("jobs").objectStore("jobs").getAll()),
};
