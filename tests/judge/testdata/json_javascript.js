const all = JSON.parse(require('fs').readFileSync(0, 'utf8'));
all.sort((a, b) => a.n - b.n);
console.log(all.map(x => x.s).join(','));
